"""`foretell tune`: which ops of a step are worth a better kernel, and whether a kernel can be trusted."""
