"""The control plane: jobs, models, deployments and files of tenants over HTTP, one room a subject.

A room's rules, rows and routes stand side by side. Rooms meet through the modules that their `__all__` names
(`tests/unit/test_rooms.py`); the modules of this package itself put them together.
"""
