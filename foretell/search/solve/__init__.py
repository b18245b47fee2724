"""From a question to a plan: `choose` asks, `find` searches by blocks, `climb` plan by plan, `engine` is what both share, `explain` says why."""
