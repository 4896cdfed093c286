"""What all tests need: to be understood by the installed version of transformers."""

import old_versions  # noqa: F401 (says names anew where they are old)
