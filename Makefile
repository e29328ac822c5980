# Every target sets up .venv by itself on first use; afterwards it is set up again only when a requirement changes.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: demo test quality

# Watch a small model forget a concept, start to end.
demo: $(STAMP)
	$(BIN)/latentwatch demo

# All tests, the slow ones too. Two processes of one thread each: more would fight over two cores. In the order of the
# files: by number of tests the few long ones would come last, one process waiting for the other.
test: export OMP_NUM_THREADS := 1
test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 40

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[demo,test]'
	touch $@
