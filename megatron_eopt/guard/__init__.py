"""Checkpoints that a kill, a full disk or a second run cannot mix; knows no optimizer.

``saves`` writes a checkpoint beside the one that it replaces. ``files`` tells whether all files of
a checkpoint are whole and of one save. Only what saves or loads whole checkpoints imports this.
Whoever changes it reads no other room.
"""
