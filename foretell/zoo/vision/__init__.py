"""Images: the classifiers others build on, U-Net, and what is trained on pictures from the ground, the air and space."""
