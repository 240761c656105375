"""How long the training is that resume_check.py kills and resume_training.py is."""

RANKS = 2
EPOCHS = 3
STEPS = 200  # in an epoch: so many that 20 kills fit in, however fast the machine is
BATCH = 16  # images for each rank in a step
SAVE_FREQ = 7  # steps from backup to backup; does not divide STEPS
PREFETCH = 2  # few, so that a death of the producer is soon felt
