"""What would make a step fit (`fit`, `ways`) or faster (`faster`, `faster_ways`), for models and scripts; each change predicted before it is told."""
