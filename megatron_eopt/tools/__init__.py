"""The command, plans, dry runs, explanations and recipes; nothing else knows them.

Whoever changes what a command says reads no other room: figures come from the optimizer itself.
"""
