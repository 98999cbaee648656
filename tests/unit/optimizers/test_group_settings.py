"""A group's own settings are checked when the optimizer is built, not in its first step."""

import pytest
import torch

from megatron_eopt import ConfigurationError
from megatron_eopt.base.errors import ConfigurationTypeError
from megatron_eopt.optimizers.group_settings import check_group_settings, check_names
from megatron_eopt.optimizers.muon import TensorParallelMuon


def adam(**own):
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], **own}])


@pytest.mark.parametrize(
    ("own", "error"),
    [
        ({"betas": 8}, ConfigurationTypeError),
        ({"betas": "qkv"}, ConfigurationTypeError),
        ({"betas": (0.9,)}, ConfigurationTypeError),
        ({"betas": (0.9, "0.99")}, ConfigurationTypeError),
        ({"betas": (0.9, 1.0)}, ConfigurationError),
        ({"eps": "0.5"}, ConfigurationTypeError),
        ({"eps": -1e-8}, ConfigurationError),
        ({"weight_decay": float("nan")}, ConfigurationError),
        ({"amsgrad": 1}, ConfigurationTypeError),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(own, error):
    (name,) = own
    with pytest.raises(error, match=name) as caught:
        check_group_settings(adam(**own))
    assert "config_overrides" in str(caught.value)


def test_what_fits_passes():
    check_group_settings(adam(betas=(0.8, 0.9), eps=1e-6, weight_decay=0, amsgrad=True))
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    check_group_settings(TensorParallelMuon([{"params": [matrix], "momentum": 0.5}]))
    with pytest.raises(ConfigurationError, match="momentum"):
        check_group_settings(TensorParallelMuon([{"params": [matrix], "momentum": 1.5}]))


@pytest.mark.parametrize("name", ["max_lrr", "optimzer", "wd_multi", "beta", "weightdecay"])
def test_a_misspelled_setting_is_refused_with_what_was_meant(name):
    with pytest.raises(ConfigurationError, match=f"{name}.*Did you mean"):
        check_names(adam(), ["eps", name])


def test_a_setting_that_nobody_here_reads_is_kept_with_a_warning(caplog):
    check_names(adam(), ["max_lr", "end_wd", "lr_mult", "betas", "color"])
    (warning,) = caplog.messages
    assert "'color'" in warning
