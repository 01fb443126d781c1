"""How drafters learn: what a target wrote, and the one loop that fits a drafter to it.

A method's loss lives with the method, in `drafter_workers.methods`.
"""
