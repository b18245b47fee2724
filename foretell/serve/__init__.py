"""Runs what `simulate.serving` schedules: a decoder as it is, its keys and values in pages, tokens out.

    requests ─► Scheduler ─► step ─► StepRunner (the model, pages, sampling) ─► tokens ─► Scheduler ─► answers
                 simulate.serving      one packed forward

`engine` puts both together; `runner` touches tensors; `sampling` chooses tokens; `http` speaks to clients. Begin with `engine`.
"""
