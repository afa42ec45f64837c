"""Publishing a converted folder: check it, write its model card, upload it."""

from kvarn_cli.hub.plan import PlannedFile, PushPlan, plan_push
from kvarn_cli.hub.upload import PushResult, push

__all__ = ["PlannedFile", "PushPlan", "PushResult", "plan_push", "push"]
