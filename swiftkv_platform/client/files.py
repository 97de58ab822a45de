"""The `/v1/files` routes: uploaded rows for jobs to train on."""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.client.models import Resource
from swiftkv_platform.client.transport import Transport


class Files:
    """Uploaded files."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def upload(self, path: Path, *, expires_after_s: int | None = None) -> Resource:
        """Upload a JSON Lines file of rows. Its id can be used as `name_or_path` in `data.sources` of a job.

        Args:
            expires_after_s: seconds for which the file is kept; None keeps it until it is deleted.

        Raises:
            InvalidRequestError: no row format reads a row; the message names its line.
        """
        form = {"purpose": "fine-tune"}
        if expires_after_s is not None:
            form |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
        with path.open("rb") as stream:
            answer = self._transport.request("POST", "/v1/files", form=form, file=(path.name, stream), repeatable=False)
        return Resource.model_validate(answer.json())

    def list(self, *, limit: int | None = None) -> list[Resource]:
        """List files, newest first; all of them without `limit`."""
        return self._transport.list(Resource, "/v1/files", limit=limit)

    def get(self, file_id: str) -> Resource:
        return self._transport.get(Resource, f"/v1/files/{file_id}")

    def download(self, file_id: str, destination: Path, *, sha256: str | None = None) -> Path:
        """Download the rows to `destination`, which is written completely or not at all, and return it.

        Raises:
            ArtifactCorruptError: `sha256` is given and the content has another digest.
        """
        return self._transport.save(f"/v1/files/{file_id}/content", destination, name=file_id, sha256=sha256)

    def delete(self, file_id: str) -> None:
        """Delete a file. Refused while an unfinished job uses it."""
        self._transport.request("DELETE", f"/v1/files/{file_id}", repeatable=True)
