"""What the check of a GPU machine found, as a section of the page."""

from typing import Any

from benchmarks.page.markdown import prose, quartiles, table


def gpu_check(figures: dict[str, Any]) -> str:
    """Write what each section found, the step against megatron-core's, and all back ends."""
    machine, sections = figures["machine"], figures["sections"]
    gpus, packages = machine["gpus"], machine["packages"]
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    before = f"""## On a GPU

    `./scripts/gpu_check.sh` ([what it checks](gpu_check.md)), on {len(gpus)} {gpus[0]["name"]},
    driver {machine["driver"]}; {versions}; commit {machine["commit"]}."""
    found = [
        [name, one["status"], "; ".join(one["problems"]) or one["skipped"] or one["headline"]]
        for name, one in sections.items()
    ]
    parts = [prose(before), table("section | result | found", found)]
    if steps := sections["step"]["figures"]:
        text = """One step of a GPT with half a billion weights (8 layers, hidden 2048, bfloat16) on
        one GPU, without Transformer Engine and Apex."""
        rows = [
            [name, f"{took:.1f}", quartiles(steps["of ours"].get(name, ())) or "1"]
            for name, took in steps["milliseconds"].items()
        ]
        parts += [prose(text), table("optimizer | median ms: | x ours (quartiles):", rows)]
    if measured := [row for row in sections["newton_schulz"]["figures"]["rows"] if "tflops" in row]:
        text = """Five steps of Newton-Schulz in 16 bits by each back end. TFLOP/s are those of the
        standard form, whatever was computed; the deviation is from float32."""
        rows = [
            [
                *(row[name] for name in ("backend", "algorithm", "matrices")),
                *(f"{row['milliseconds']:.3g}", f"{row['tflops']:.0f}", f"{row['deviation']:.1e}"),
            ]
            for row in sorted(measured, key=lambda row: (row["matrices"], row["milliseconds"]))
        ]
        head = "back end | form | matrices | ms: | TFLOP/s: | deviation:"
        parts += [prose(text), table(head, rows)]
    return "\n".join(parts)
