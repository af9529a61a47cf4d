"""What surrounds a run of train.py: flags, checks, launch, lock, signals, messages. None of it is the recipe."""
