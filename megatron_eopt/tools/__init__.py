"""The command, plans, dry runs, explanations and recipes; nothing else knows them."""
