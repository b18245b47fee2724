"""Inference split over several devices: `units` of a trace with seconds on each device, `split` finds every split that is best at something."""
