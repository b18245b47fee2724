"""Profiles from measurements: `fit` what a probe measured, `learn` from a run, add what others `shared`."""
