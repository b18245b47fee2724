"""One model on several ranks (tp × pp) under one controller, which schedules and computes nothing.

    HTTP ─► RankedEngine ─► step, as plain data ─► rank (tp 0, pp 0) ─► … ─► rank (tp 0, pp last) ─► tokens ─► RankedEngine
             `engine`         `controller`          `worker`, `stage`

Each rank holds its part of the weights and the pages of its own heads and layers. With pp ranks as many steps are under way.
"""
