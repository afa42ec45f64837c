"""What can go wrong, as one small tree.

    KvarnError                    exit code 1
    ├── UsageError            2   an option or argument cannot be used as given
    │   └── SettingsError     2   quantizer settings that no record can hold
    ├── UnsupportedModelError 3   the model cannot be converted or inspected this way
    ├── HubError              4   the Hub or the network did not do what was asked
    ├── ThresholdError        5   validation measured more error than allowed
    ├── CheckpointError       6   a file of the checkpoint is broken or hostile
    └── DiskFullError         7   the disk has no room for the output

Every error says what, where, and (in `hint`) what would work instead. The command line prints
both and exits with `exit_code`; SIGINT exits with 130, SIGTERM with 143.
"""

from collections.abc import Mapping
from typing import ClassVar


class KvarnError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: one sentence that names the file, layer or setting.
        hint: what the user can do next, or an empty string.
        details: JSON-ready data that belongs to the error, such as what was measured.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, hint: str = "", details: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.details = dict(details or {})


class UsageError(KvarnError):
    """An option or argument cannot be used as given."""

    exit_code = 2


class SettingsError(UsageError):
    """Quantizer settings that no record can hold."""


class UnsupportedModelError(KvarnError):
    """The model cannot be converted or inspected as asked; nothing was written."""

    exit_code = 3


class HubError(KvarnError):
    """The Hub or the network did not do what was asked."""

    exit_code = 4


class ThresholdError(KvarnError):
    """Validation measured more error than the thresholds allow."""

    exit_code = 5


class CheckpointError(KvarnError):
    """A file of the checkpoint is broken or hostile."""

    exit_code = 6


class DiskFullError(KvarnError):
    """The disk has no room for the output; what is finished stays, to be continued."""

    exit_code = 7
