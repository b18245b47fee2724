"""Models of science: fields, particles, detectors, proteins."""
