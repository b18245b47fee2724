"""Scenes in three dimensions: radiance fields, splats, meshes and scene graphs."""
