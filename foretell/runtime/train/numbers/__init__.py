"""What keeps the numbers of a run sound: clipped gradients, a scaled loss, steps that are not finite and who was first."""
