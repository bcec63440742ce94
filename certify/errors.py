"""Errors of the certify and privacy packages: one sentence with the file or field, the finding, the remedy."""


class CertdpError(Exception):
    """Base of every error a user can provoke; the command turns it into exit code 2."""


class RecipeError(CertdpError):
    """A recipe field is missing, unknown or out of range."""


class DataError(CertdpError):
    """A table has wrong columns, shapes, or values that are not finite."""


class RadiusError(CertdpError):
    """A list of radii is malformed, not contiguous where it must be, or beyond the number of slots."""


class EnvelopeError(CertdpError):
    """An envelope file is truncated, edited, of an unknown version or violates its own invariants."""


class CheckpointError(CertdpError):
    """A checkpoint is missing, damaged or belongs to another run."""


class PrivacyError(CertdpError):
    """A release was asked for with parameters that are not admissible."""


class CapabilityError(PrivacyError):
    """An envelope lacks a property (soundness, monotonicity) that a private release needs."""


class ShadowedPackageError(CertdpError, ImportError):
    """Another module on the path hides one of this distribution's packages."""
