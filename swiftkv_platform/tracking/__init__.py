"""Experiment tracking: sends a run's metrics to a tracker, in addition to the job's own events. Independent of Ray and
the control plane."""
