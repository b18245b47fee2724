"""Language models that see: pictures, slices of large ones, and videos, beside text."""
