"""`/jobs/{id}/checkpoints`, `/artifacts` and `/tracking`: what a job leaves in the object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from swiftkv_platform.contract.attempts import MANIFEST, ManifestFile
from swiftkv_platform.control_plane.access.callers import Fetcher, Streamed
from swiftkv_platform.control_plane.base import Page, Slice
from swiftkv_platform.control_plane.http.answers import ListAnswer, OldestFirst, list_answer
from swiftkv_platform.control_plane.jobs.answers import (
    ArtifactFileAnswer,
    CheckpointAnswer,
    TrackingFileAnswer,
    checkpoint_id,
    page_of,
)
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus
from swiftkv_platform.control_plane.parts import Components, Parts
from swiftkv_platform.errors import NotFoundError
from swiftkv_platform.storage.artifacts import manifest_digest, read_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore, StoredCheckpoint
from swiftkv_platform.storage.object_store import ObjectInfo

router = APIRouter(prefix="/jobs/{job_id}", tags=["jobs"])

_URL_LIFETIME_S = 3600


@router.get("/checkpoints")
def list_checkpoints(job_id: str, parts: Parts, caller: Fetcher, page: OldestFirst) -> ListAnswer[CheckpointAnswer]:
    """List complete checkpoints of all attempts, by step, with held-out KL if it was measured."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)
    chosen = _chosen_checkpoint(parts.attempts, job)

    def answer(checkpoint: StoredCheckpoint) -> CheckpointAnswer:
        return CheckpointAnswer.of(checkpoint, model=job.distilled_model if checkpoint.key == chosen else None)

    return list_answer(page_of_checkpoints(parts.attempts, job_id, page), answer)


def page_of_checkpoints(attempts: AttemptStore, job_id: str, page: Page) -> Slice[StoredCheckpoint]:
    """Return a page of a job's complete checkpoints. Only manifests of the page are read."""
    names = attempts.checkpoint_names(job_id)
    remaining = page_of(names, checkpoint_id, replace(page, limit=max(len(names), 1))).items
    found = attempts.read_checkpoints(remaining, page.limit + 1)
    return Slice(found[: page.limit], has_more=len(found) > page.limit)


def _chosen_checkpoint(attempts: AttemptStore, job: Job) -> str | None:
    """Return the key of the checkpoint that the job's model is made of: the newest attempt's at the model's step."""
    step = ((job.result or {}).get("training") or {}).get("step")
    names = [name for name in reversed(attempts.checkpoint_names(job.id)) if name.step == step]
    return next((found.key for found in attempts.read_checkpoints(names, 1)), None)


@router.get("/artifacts")
def list_artifacts(
    request: Request, job_id: str, parts: Parts, caller: Fetcher, page: OldestFirst
) -> ListAnswer[ArtifactFileAnswer]:
    """The files of the distilled model, by path; none before the job has succeeded."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)

    def answer(item: tuple[str, ManifestFile]) -> ArtifactFileAnswer:
        path, file = item
        url = parts.objects.presigned_url(f"{job.attempt_id.artifact_prefix}/{path}", _URL_LIFETIME_S)
        url = url or str(request.url_for("download_artifact", job_id=job.id, path=path))
        return ArtifactFileAnswer(path=path, size=file.size, sha256=file.sha256, url=url)

    kept = page_of(list(_files(parts, job).items()), lambda item: item[0], page)
    return list_answer(kept, answer, lambda file: file.path)


@router.get("/artifacts/{path:path}", response_class=StreamingResponse)
def download_artifact(job_id: str, path: str, parts: Parts, _stream: Streamed, caller: Fetcher) -> StreamingResponse:
    """One file of the distilled model."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)
    file = _files(parts, job).get(path)
    if file is None:
        message = f"job {job_id} has no artifact file {path!r}; GET /jobs/{job_id}/artifacts lists them"
        raise NotFoundError(message, field="path", value=path)
    return StreamingResponse(
        parts.objects.stream(f"{job.attempt_id.artifact_prefix}/{path}"),
        media_type="application/octet-stream",
        headers={"Content-Length": str(file.size), "ETag": f'"{file.sha256}"'},
    )


@router.get("/tracking")
def list_tracking_files(
    request: Request, job_id: str, parts: Parts, caller: Fetcher, page: OldestFirst
) -> ListAnswer[TrackingFileAnswer]:
    """List files of W&B runs that are not uploaded to W&B yet, by path; `swiftkv jobs wandb-sync` uploads them."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    kept = page_of(list(parts.attempts.tracking_files(job_id).items()), lambda item: item[0], page)

    def answer(item: tuple[str, ObjectInfo]) -> TrackingFileAnswer:
        path, file = item
        url = parts.objects.presigned_url(file.key, _URL_LIFETIME_S)
        url = url or str(request.url_for("download_tracking_file", job_id=job_id, tracking_path=path))
        return TrackingFileAnswer(path=path, size=file.size, url=url)

    return list_answer(kept, answer, lambda file: file.path)


@router.get("/tracking/{tracking_path:path}", response_class=StreamingResponse)
def download_tracking_file(
    job_id: str, tracking_path: str, parts: Parts, _stream: Streamed, caller: Fetcher
) -> StreamingResponse:
    """One file of a W&B run."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    file = parts.attempts.tracking_files(job_id).get(tracking_path)
    if file is None:
        message = f"job {job_id} has no tracking file {tracking_path!r}; GET /jobs/{job_id}/tracking lists them"
        raise NotFoundError(message, field="tracking_path", value=tracking_path)
    # A run in progress replaces its files, so no size is sent.
    return StreamingResponse(parts.objects.stream(file.key), media_type="application/octet-stream")


def _files(parts: Components, job: Job) -> Mapping[str, ManifestFile]:
    """Files by path, the manifest itself included."""
    if job.status is not JobStatus.SUCCEEDED or job.artifact_uri is None:  # its model may have been deleted
        return {}
    manifest = read_manifest(parts.objects, job.attempt_id.artifact_prefix)
    itself = parts.objects.head(f"{job.attempt_id.artifact_prefix}/{MANIFEST}")
    if itself is None:
        return manifest.files
    return {**manifest.files, MANIFEST: ManifestFile(size=itself.size, sha256=manifest_digest(manifest))}
