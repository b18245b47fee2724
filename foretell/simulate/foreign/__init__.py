"""Steps of other training software (`lower.foreign`): `step` has their seconds, `memory` their bytes, `schedule` their pipelines."""
