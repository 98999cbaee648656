from megatron_eopt.math.finite import NonFiniteError


def test_many_culprits_are_cut_short() -> None:
    assert "and 4 more" in str(NonFiniteError("gradients", [f"layer{i}" for i in range(12)]))
