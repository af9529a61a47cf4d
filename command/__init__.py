"""What surrounds a run of train.py: flags, checks, launch, lock, signals, messages, figures.

None of it is the recipe. No file here imports train.py; what they need of it (the class Config, its
tables) comes in as arguments.
"""
