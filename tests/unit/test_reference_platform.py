"""The platform class answers whatever SGLang may ask a platform."""

from __future__ import annotations

import inspect

import torch
from sglang.srt.platforms.device_mixin import DeviceMixin

from glm_sglang.reference_platform.platform import ReferencePlatform


def test_no_question_is_left_to_upstreams_not_implemented() -> None:
    """An unanswered one ends the scheduler when it is first asked: /start_profile was such a one."""
    left = [
        name
        for name, function in inspect.getmembers(DeviceMixin, inspect.isfunction)
        if getattr(ReferencePlatform, name) is function
        and "raise NotImplementedError" in inspect.getsource(function)
    ]
    assert left == []


def test_a_profile_is_one_of_the_cpu() -> None:
    platform = ReferencePlatform()
    activity = platform.get_torch_profiler_activity()
    assert activity is getattr(torch.profiler.ProfilerActivity, platform.get_torch_profiler_activity_str())
