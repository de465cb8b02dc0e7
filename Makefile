# Two commands do everything on a fresh machine: `make demo` and `make test`.
# By default they use their own environment, .venv, made and filled by `make install`.
# `make demo PYTHON=/path/to/python` uses an environment of yours and installs nothing into it.

PYTHON := .venv/bin/python
own_environment := $(filter file,$(origin PYTHON))

# Editable installs do not see a package added later, so the stamp carries the set of packages in its name.
packages := $(sort $(dir $(wildcard moe_int8/__init__.py moe_int8/*/__init__.py models/*/__init__.py models/__init__.py \
                                    parallel/__init__.py serving/__init__.py evals/__init__.py)))
stamp := .venv/installed-$(shell echo $(packages) | cksum | cut -d' ' -f1)

.PHONY: install demo test lint wheel-check clean

ifneq ($(own_environment),)
install: $(stamp)
else
install:
	@$(PYTHON) -c 'import moe_int8.models' || { echo "error: $(PYTHON) has no moe_int8: run '$(PYTHON) -m pip install -e .[test]' first"; exit 1; }
endif

$(stamp): setup.py pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: python3 is older than 3.11"; exit 1; }
	@test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[test]'
	@rm -f .venv/installed-*
	@touch $@
