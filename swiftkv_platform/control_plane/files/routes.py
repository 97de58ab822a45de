"""`/v1/files`: upload, list, get, read and delete files of rows, in OpenAI's format."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from swiftkv_platform.control_plane.access.callers import (
    FetchingCaller,
    ReadingCaller,
    StreamSlot,
    UploadingCaller,
    WritingCaller,
)
from swiftkv_platform.control_plane.base import Caller, Page, PageQuery
from swiftkv_platform.control_plane.components import ComponentsDep, SettingsDep, UploadParsersDep
from swiftkv_platform.control_plane.files.repository import File, Purpose
from swiftkv_platform.control_plane.files.service import FileService
from swiftkv_platform.control_plane.parsing import ParserPool
from swiftkv_platform.control_plane.responses import (
    ListResponse,
    ResponseModel,
    make_list_response,
    make_page_query,
)
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.limits import UPLOAD_SECONDS
from swiftkv_platform.web.limiters import Client, watch_client
from swiftkv_platform.web.middleware import get_content_length
from swiftkv_platform.web.problems import ERROR_RESPONSES


class UploadedFileResponse(ResponseModel):
    """An uploaded file. Times are Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    """Always `processed`: every row is checked before the file is stored."""
    expires_at: int | None
    """Time from which new jobs may not use the file; it is deleted once no job uses it."""
    sha256: str
    rows: int
    format: str
    """Format of the file's first row; `prompts` for rows that the teacher completes."""

    @classmethod
    def from_file(cls, file: File) -> Self:
        return cls.model_validate({**vars(file), "bytes": file.size})


class DeletedFileResponse(ResponseModel):
    """Confirmation that a file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


PATH = "/v1/files"
MAX_FORM_BYTES = 1 << 16
"""Max bytes of a form in addition to its file."""
_MAX_FIELD_BYTES = 1024
_MAX_NAME_CHARS = 255
_UPLOAD_TIMEOUT_S = float(UPLOAD_SECONDS.default)
_MIN_LIFETIME_S, _MAX_LIFETIME_S = 3600, 30 * 86400

router = APIRouter(prefix=PATH, tags=["files"], responses=ERROR_RESPONSES)


def _get_file_service(parts: ComponentsDep, settings: SettingsDep) -> FileService:
    return FileService(parts, settings)


Service = Annotated[FileService, Depends(_get_file_service)]


_UPLOAD_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "title": "UploadForm",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "Rows as JSON Lines, in any row format of a data source.",
                        },
                        "purpose": {"type": "string", "enum": ["fine-tune"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": _MIN_LIFETIME_S,
                            "maximum": _MAX_LIFETIME_S,
                            "description": "Seconds until the file expires. Without it, the file is kept until it is "
                            "deleted.",
                        },
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=_UPLOAD_SCHEMA)
async def upload_file(
    request: Request, service: Service, parsers: UploadParsersDep, caller: UploadingCaller
) -> UploadedFileResponse:
    """Upload rows as JSON Lines. Every row is checked; the file is stored completely or not at all.

    Use the returned id as `data.sources[].name_or_path` of a job, or as `training_file`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise HTTPException(415, f"Content-Type is {kind or 'missing'!r}; only multipart/form-data is accepted")
    # 1. check the announced size  2. receive the form  3. check and store the file
    announced_size = get_content_length(request.headers) - MAX_FORM_BYTES
    # The caller is authenticated before the body is read; a parameter for the form would read it first.
    with parsers.limiter.hold(caller.tenant, caller.name):
        await run_in_threadpool(service.check_quota, caller, max(announced_size, 0))
        try:
            async with (
                asyncio.timeout(_UPLOAD_TIMEOUT_S),
                request.form(max_files=1, max_fields=4, max_part_size=_MAX_FIELD_BYTES) as form,
                watch_client(request) as client,  # the body has been read
            ):
                return await run_in_threadpool(_store_upload, form, service, caller, client, parsers)
        except TimeoutError as error:
            raise HTTPException(408, f"the upload took more than {_UPLOAD_TIMEOUT_S:g} s") from error


def _store_upload(
    form: FormData, service: FileService, caller: Caller, client: Client, parsers: ParserPool
) -> UploadedFileResponse:
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidInputError("file is missing; send a file of JSON Lines in the form's field `file`", field="file")
    file = service.upload(
        upload.file,
        filename=_parse_filename(upload.filename or ""),
        purpose=_parse_purpose(form),
        expires_after_s=_parse_lifetime(form),
        caller=caller,
        client=client,
        parsers=parsers,
    )
    return UploadedFileResponse.from_file(file)


def _parse_filename(name: str) -> str:
    plain = name.replace("\\", "/").rpartition("/")[2] or "upload.jsonl"
    if not plain.isprintable() or len(plain) > _MAX_NAME_CHARS:
        message = f"file is named {plain[:64]!a}; use a name of at most {_MAX_NAME_CHARS} printable characters"
        raise InvalidInputError(message, field="file", value=ascii(plain[:64]))
    return plain


def _parse_purpose(form: FormData) -> Purpose:
    purpose = form.get("purpose")
    if purpose == "fine-tune":
        return "fine-tune"
    message = f"purpose is {str(purpose)[:64]!a}; only 'fine-tune' is accepted"
    raise InvalidInputError(message, field="purpose", value=str(purpose)[:64])


def _parse_lifetime(form: FormData) -> int | None:
    """Return the seconds until the file expires; None if it does not expire."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        message = f"expires_after.anchor is {str(anchor)[:64]!a}; only 'created_at' is accepted"
        raise InvalidInputError(message, field="expires_after.anchor", value=str(anchor)[:64])
    text = str(seconds)
    if not text.isdecimal() or len(text) > 9 or not _MIN_LIFETIME_S <= int(text) <= _MAX_LIFETIME_S:
        raise InvalidInputError(
            f"expires_after.seconds is {text[:64]!a}; {_MIN_LIFETIME_S} to {_MAX_LIFETIME_S} is accepted",
            field="expires_after.seconds",
            value=text[:64],
        )
    return int(text)


@router.get("")
def list_files(
    parts: ComponentsDep,
    caller: ReadingCaller,
    page: Annotated[PageQuery, Depends(make_page_query(1000, "desc", max_limit=10_000))],
    purpose: Annotated[str | None, Query(description="only files of this purpose")] = None,
) -> ListResponse[UploadedFileResponse]:
    """List files, newest first."""
    found = parts.files.list(page, tenant=caller.tenant)
    if purpose not in (None, "fine-tune"):
        found = Page([], has_more=False)
    return make_list_response(found, UploadedFileResponse.from_file, order=page.order)


@router.get("/{file_id}")
def get_file(file_id: str, parts: ComponentsDep, caller: ReadingCaller) -> UploadedFileResponse:
    """Return a file's description."""
    return UploadedFileResponse.from_file(parts.files.get(file_id, tenant=caller.tenant))


@router.get("/{file_id}/content", response_class=StreamingResponse)
def get_file_content(file_id: str, service: Service, _stream: StreamSlot, caller: FetchingCaller) -> StreamingResponse:
    """Return a file's rows as they were uploaded."""
    file, content = service.open_content(file_id, caller)
    return StreamingResponse(
        content,
        media_type="application/octet-stream",
        headers={
            "Content-Length": str(file.size),
            "ETag": f'"{file.sha256}"',
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename)}",
        },
    )


@router.delete("/{file_id}")
def delete_file(file_id: str, service: Service, caller: WritingCaller) -> DeletedFileResponse:
    """Delete a file. Returns 409 while an unfinished job uses it."""
    service.delete(file_id, caller)
    return DeletedFileResponse(id=file_id)
