"""Alembic's entry point. It works on the connection, and in the transaction, that `Database.upgrade` hands over."""

from __future__ import annotations

from alembic import context

from swiftkv_platform.control_plane.database.tables import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
context.run_migrations()
