"""`python -m recipes` is `latentwatch`."""

import sys

from recipes.cli import main

sys.exit(main())
