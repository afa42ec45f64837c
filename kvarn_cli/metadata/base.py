"""What all parts of the metadata share: strict models, and errors that say where."""

from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvarn_cli.errors import CheckpointError

FORMAT_VERSION: Final = 1


class Block(BaseModel):
    """Unknown fields, other types and NaN are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_Model = TypeVar("_Model", bound=Block)


def read_block(model: type[_Model], content: object, where: str) -> _Model:
    """Check untrusted content against a model.

    Args:
        model: what it should be.
        content: JSON, or what JSON was read into.
        where: names it in messages.

    Raises:
        CheckpointError: it is broken, or of a format version that this release cannot read.
    """
    try:
        if isinstance(content, str | bytes):
            return model.model_validate_json(content)
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        if field == "format_version":
            raise CheckpointError(
                f"{where}: format_version {first['input']!r} is unknown to this release, "
                f"which reads version {FORMAT_VERSION}",
                hint="upgrade with: pip install --upgrade kvarn-cli",
            ) from error
        raise CheckpointError(
            f"{where} is broken at {field or 'its start'}: {first['msg']}"
        ) from error
