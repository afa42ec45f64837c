"""The routes of the fake Hub: what huggingface_hub 2.4 asks, and what the Hub answers."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import yaml
from hub_http import Answer, HttpHandler, RefusedError, Request
from hub_repository import Repository, StoredFile, is_lfs

WRITE_TOKEN = "hf_WriteTokenOfAlice000000000000000"
READ_TOKEN = "hf_ReadTokenOfBob0000000000000000000"


def _namespace(repo_id: str) -> str:
    return repo_id.partition("/")[0]


class HubHandler(HttpHandler):
    """Answers as the Hub does."""

    def answer_to(self, request: Request) -> Answer:
        for method, pattern, handle in _ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match and request.method in method:
                return handle(self, **{k: unquote(v) for k, v in match.groupdict().items() if v})
        raise RefusedError(404, f"no route for {request.method} {request.path}")

    def _user(self) -> str | None:
        token = self.request_now.token
        if token is None:
            return None
        user = {WRITE_TOKEN: "alice", READ_TOKEN: "bob"}.get(token)
        if user is None:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return user

    def _writer(self, namespace: str) -> None:
        user = self._user()
        if user is None:
            raise RefusedError(401, "Invalid username or password.")
        if user != namespace or self.request_now.token == READ_TOKEN:
            raise RefusedError(403, f"You don't have the rights to write to {namespace}")

    def _readable(self, repo_id: str) -> Repository:
        user = self._user()
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and user != _namespace(repo_id)):
            raise RefusedError(404 if user else 401, "Repository not found", "RepoNotFound")
        return repository

    def _writable(self, repo_id: str) -> Repository:
        repository = self._readable(repo_id)
        self._writer(_namespace(repo_id))
        return repository

    def _commit_of(self, repository: Repository, revision: str) -> str:
        commit = repository.resolve(revision)
        if commit is None:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def create(self) -> Answer:
        wanted = self.body_json()
        user = self._user()
        namespace = wanted.get("organization") or user or "nobody"
        self._writer(namespace)
        repo_id = f"{namespace}/{wanted['name']}"
        url = {"url": f"{self.hub.endpoint}/{repo_id}"}
        if repo_id in self.hub.repositories:
            return 409, url | {"error": "You already created this model repo"}, {}
        self.hub.add_repository(repo_id, private=wanted.get("visibility") == "private")
        return 200, url, {}

    def validate_card(self) -> Answer:
        content = self.body_json()["content"]
        warnings = [{"message": text} for text in self.hub.card_warnings]
        errors = []
        match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        try:
            data = yaml.safe_load(match[1]) if match else {}
        except yaml.YAMLError as error:
            data, errors = {}, [{"message": f"Invalid YAML: {error}"}]
        for name in ("license", "pipeline_tag", "library_name"):
            if not isinstance(data.get(name, ""), str):
                errors.append({"message": f'"{name}" must be a string'})
        return 400 if errors else 200, {"errors": errors, "warnings": warnings}, {}

    def info(self, repo: str, revision: str = "main") -> Answer:
        repository = self._readable(repo)
        commit = self._commit_of(repository, revision)
        names = [{"rfilename": path} for path in repository.commits[commit]]
        facts = {"private": repository.private, "gated": "auto" if repository.gated else False}
        return 200, {"id": repo, "sha": commit, "siblings": names, "tags": [], **facts}, {}

    def tree(self, repo: str, revision: str) -> Answer:
        repository = self._readable(repo)
        tree = repository.commits[self._commit_of(repository, revision)]
        folders = {str(parent) for path in tree for parent in PurePosixPath(path).parents} - {"."}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders
        ]
        for path, file in tree.items():
            size = len(file.content)
            entry = {"type": "file", "oid": file.blob_id, "size": size, "path": path}
            if file.is_lfs:
                pointer_size = len(file.pointer)
                entry["lfs"] = {"oid": file.sha256, "size": size, "pointerSize": pointer_size}
            entries.append(entry)
        start = int(self.query.get("cursor", 0))
        end = start + self.hub.page_size
        headers = {}
        if end < len(entries):
            next_page = f"{self.hub.endpoint}{self.request_now.path}?recursive=true&cursor={end}"
            headers["Link"] = f'<{next_page}>; rel="next"'
        return 200, entries[start:end], headers

    def branch(self, repo: str, branch: str) -> Answer:
        repository = self._writable(repo)
        if branch in repository.branches:
            raise RefusedError(409, f"Reference already exists: {branch}")
        repository.branches[branch] = repository.branches["main"]
        return 200, {}, {}

    def preupload(self, repo: str, revision: str) -> Answer:
        repository = self._writable(repo)
        tree = repository.commits[self._commit_of(repository, revision)]
        ignored = tree[".gitignore"].content.decode().split() if ".gitignore" in tree else []
        answers = []
        for file in self.body_json()["files"]:
            stored = tree.get(file["path"])
            answer = {
                "path": file["path"],
                "uploadMode": "lfs" if is_lfs(file["path"], file["size"]) else "regular",
                "shouldIgnore": file["path"] in ignored,
            }
            if stored is not None:
                answer["oid"] = stored.sha256 if stored.is_lfs else stored.blob_id
            answers.append(answer)
        return 200, {"files": answers}, {}

    def lfs_batch(self, repo: str) -> Answer:
        self._writable(repo)
        objects = [
            {"oid": wanted["oid"], "size": wanted["size"]}
            | ({} if wanted["oid"] in self.hub.objects else self._actions(repo, **wanted))
            for wanted in self.body_json()["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _actions(self, repo: str, oid: str, size: int) -> dict[str, Any]:
        lfs, stored = (
            f"{self.hub.endpoint}/{repo}.git/info/lfs",
            f"{self.hub.storage}/storage/{oid}",
        )
        upload: dict[str, Any] = {"href": f"{stored}?X-Amz-Signature=s3cret"}
        if size > self.hub.part_bytes:
            numbers = range(1, -(-size // self.hub.part_bytes) + 1)
            parts = {f"{number:05}": f"{stored}?part={number}" for number in numbers}
            header = {"chunk_size": str(self.hub.part_bytes), **parts}
            upload = {"href": f"{lfs}/complete", "header": header}
        return {"actions": {"upload": upload, "verify": {"href": f"{lfs}/verify"}}}

    def store(self, oid: str) -> Answer:
        if self.request_now.token is not None:
            raise RefusedError(400, "Only one auth mechanism allowed")
        body = self.request_now.body
        if "part" in self.query:
            self.hub.parts.setdefault(oid, {})[int(self.query["part"])] = body
            return 200, b"", {"ETag": hashlib.md5(body).hexdigest()}
        self._keep(oid, body)
        return 200, b"", {}

    def _keep(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise RefusedError(400, "The content does not match its checksum")
        self.hub.objects[oid] = content

    def complete(self, repo: str) -> Answer:
        finished = self.body_json()
        parts = self.hub.parts.pop(finished["oid"])
        self._keep(
            finished["oid"], b"".join(parts[part["partNumber"]] for part in finished["parts"])
        )
        return 200, {}, {}

    def verify(self, repo: str) -> Answer:
        self._writable(repo)
        wanted = self.body_json()
        if len(self.hub.objects.get(wanted["oid"], b"")) != wanted["size"]:
            raise RefusedError(422, "The object is not there")
        return 200, {}, {}

    def commit(self, repo: str, revision: str) -> Answer:
        repository = self._writable(repo)
        tree = dict(repository.commits[self._commit_of(repository, revision)])
        message = ""
        for line in self.request_now.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                tree[value["path"]] = StoredFile(base64.b64decode(value["content"]), False)
            elif key == "lfsFile" and value["oid"] in self.hub.objects:
                tree[value["path"]] = StoredFile(self.hub.objects[value["oid"]], True)
            else:
                raise RefusedError(422, f"cannot take {key} {value.get('path')}")
        commit = repository.commit(revision, tree, message)
        url = f"{self.hub.endpoint}/{repo}/commit/{commit}"
        return 200, {"success": True, "commitOid": commit, "commitUrl": url}, {}

    def resolve(self, repo: str, revision: str, path: str) -> Answer:
        repository = self._readable(repo)
        if repository.gated and self._user() != _namespace(repo):
            status = 403 if self._user() else 401
            raise RefusedError(status, "Access to this model is restricted", "GatedRepo")
        commit = self._commit_of(repository, revision)
        headers = {"X-Repo-Commit": commit}
        file = repository.commits[commit].get(path)
        if file is None:
            raise RefusedError(404, "Entry not found", "EntryNotFound")
        if not file.is_lfs:
            return 200, file.content, headers | {"ETag": f'"{file.blob_id}"'}
        self.hub.objects[file.sha256] = file.content
        headers |= {
            "X-Linked-Etag": f'"{file.sha256}"',
            "X-Linked-Size": str(len(file.content)),
            "Location": f"{self.hub.storage}/storage/{file.sha256}",
        }
        return 302, b"", headers

    def fetch(self, oid: str) -> Answer:
        if self.request_now.token is not None:
            raise RefusedError(400, "Only one auth mechanism allowed")
        content = self.hub.objects[oid]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or self.hub.ignores_ranges:
            return 200, content, {"ETag": f'"{oid}"'}
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        served = f"bytes {first}-{last}/{len(content)}"
        return 206, content[first : last + 1], {"Content-Range": served}


_API, _REPO = "/api/models", r"(?P<repo>[\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Callable[..., Answer]]] = [
    (("POST",), "/api/repos/create", HubHandler.create),
    (("POST",), "/api/validate-yaml", HubHandler.validate_card),
    (("GET",), rf"{_API}/{_REPO}(/revision/(?P<revision>[^/]+))?", HubHandler.info),
    (("GET",), rf"{_API}/{_REPO}/tree/(?P<revision>[^/]+)", HubHandler.tree),
    (("POST",), rf"{_API}/{_REPO}/branch/(?P<branch>[^/]+)", HubHandler.branch),
    (("POST",), rf"{_API}/{_REPO}/preupload/(?P<revision>[^/]+)", HubHandler.preupload),
    (("POST",), rf"{_API}/{_REPO}/commit/(?P<revision>[^/]+)", HubHandler.commit),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", HubHandler.lfs_batch),
    (("POST",), rf"/{_REPO}\.git/info/lfs/complete", HubHandler.complete),
    (("POST",), rf"/{_REPO}\.git/info/lfs/verify", HubHandler.verify),
    (("PUT",), r"/storage/(?P<oid>\w{64})", HubHandler.store),
    (("GET", "HEAD"), r"/storage/(?P<oid>\w{64})", HubHandler.fetch),
    (
        ("GET", "HEAD"),
        rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        HubHandler.resolve,
    ),
]
