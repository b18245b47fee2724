"""Seconds: `streams` runs tasks on named resources, `step` makes the tasks of a rank's step and reads the answer off."""
