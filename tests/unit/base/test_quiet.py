"""What an import of upstream's modules prints."""

import logging

from megatron_eopt.base.quiet import importing_quietly


def test_a_missing_gpu_is_not_reported_while_importing(caplog):
    log = logging.getLogger("torch.utils.cpp_extension")
    log.addHandler(caplog.handler)
    with importing_quietly():
        log.warning("No CUDA runtime is found")
    log.warning("afterwards")
    log.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"afterwards"}
