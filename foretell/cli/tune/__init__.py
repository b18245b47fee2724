"""`foretell tune`: which ops of a step are worth a better kernel, whether a kernel can be trusted, and which settings serve best."""
