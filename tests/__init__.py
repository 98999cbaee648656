import gc

# modules make objects that stay, and looking for garbage among them would take a tenth of the time
gc.set_threshold(50_000, 20, 20)
