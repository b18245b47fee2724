"""Does a plan compute what one process computes? `verify` holds losses and gradients side by side, on a small `twin` where the plan is large."""
