"""What is where in a picture: detectors, segmentation, and views from above. `boxes` has what the detectors share."""
