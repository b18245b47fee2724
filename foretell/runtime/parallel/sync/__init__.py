"""Replicas that step alone, and what joins them every so many steps (DiLoCo)."""
