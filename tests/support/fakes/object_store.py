"""An object store in this process's memory. Passes the contract suite of the real ones."""

from pathlib import Path

from obstore.store import MemoryStore

from swiftkv_platform.storage.bucket_store import BucketStore
from swiftkv_platform.storage.object_store import validate_object_key


class InMemoryObjectStore(BucketStore):
    """A bucket without a server, shared by all users of the object. `uri` cannot be opened."""

    def __init__(self) -> None:
        super().__init__("s3", "test")
        self._client = MemoryStore()

    @property
    def uri(self) -> str:
        return "memory://test"

    def upload_file(self, path: Path, key: str) -> None:
        self.put_bytes(key, path.read_bytes())

    def create_presigned_url(self, key: str, expires_s: int) -> str | None:
        validate_object_key(key)
        return None

    def ping(self) -> None:
        """Do nothing: memory is always available."""
