"""Windows as linear and mixed-integer programs: formulation, solving, and safe bounds."""
