# Targets for developers and CI. Each starts its own servers and leaves nothing running.

CARGO ?= cargo

.PHONY: help test lint docs unit test-topologies package deb deb-test packaging-test interop interop-build bench bench-redisson bench-peers api api-update stress robustness soak \
	simulate simulate-mutants mutants explore deny schedulers semver book fuzz redis jq tmux faketime chromium postgresql mariadb patch

help:
	@echo "make test     everything: format, lint, docs, all tests (installs servers and tools that they need if permitted)"
	@echo "make test-topologies  only the tests with TLS and ACL, Sentinel and Cluster (part of make test)"
	@echo "make interop  tests with the real Redisson (part of make test if a JDK and Maven are installed)"
	@echo "make deb      the Debian package of the command, in target/debian"
	@echo "make deb-test  builds that package, installs it into an empty root, uses it and removes it"
	@echo "make packaging-test  checks Dockerfile, manifests, units and workflows, and starts the pods of the manifests"
	@echo "make bench    the benchmark; writes target/bench.json"
	@echo "make bench-redisson  Redisson and redlatch side by side; writes target/bench-redisson.json"
	@echo "make bench-peers  redlatch beside other lock libraries; writes target/bench-peers.json, tables and plots"
	@echo "make robustness  injects faults into servers, networks and clients, and checks the locks"
	@echo "make simulate runs the real client on a simulated network and server (a minute, SEEDS=… or SEED=…)"
	@echo "make simulate-mutants  checks that the simulation detects deliberate bugs in the client and scripts (hours)"
	@echo "make mutants  checks that the unit tests detect a changed expression (MODULE=hold|lease|wait|watchdog|session|rules)"
	@echo "make fuzz     fuzzes all that parses data from outside, with libFuzzer (SECONDS=60 for each of TARGETS)"
	@echo "make deny     checks licenses, vulnerabilities and origins of dependencies"
	@echo "make schedulers  checks the examples for other schedulers, whose dependencies nothing else needs"
	@echo "make semver   compares the version with the changes of the public API since the last release"
	@echo "make book     the guide as a book, in target/book"
	@echo "make api      compares the public API with redlatch/api.txt; make api-update writes that file"
	@echo "make explore  checks all sequences of steps on the rules, and of events in the client (at most STATES=10000000, of some a tenth)"
	@echo "make soak     random faults, with many clients (SECONDS=600 TOPOLOGY=single SEED=…)"
	@echo "make stress   the concurrency tests in a loop, half of the runs with busy cores (RUNS=200)"

# The checks compute while the tests wait, with a low priority, so that the tests run as if alone. Those that need Cargo's lock
# begin when the tests are built. That of the packages comes beside the last tests: it builds the macros once more, at the place where
# the doc tests look for them.
test: redis tmux faketime chromium postgresql mariadb patch jq
	@mkdir -p target
	@nice $(MAKE) interop-build lint docs >target/checks.log 2>&1 & checks=$$!; trap "kill $$checks" INT TERM; \
		$(MAKE) unit; tests=$$?; wait $$checks; failed=$$?; \
		nice $(MAKE) package >>target/checks.log 2>&1 & checks=$$!; trap "kill $$checks" INT TERM; \
		$(MAKE) interop; tests=$$((tests + $$?)); wait $$checks; failed=$$((failed + $$?)); \
		cat target/checks.log; exit $$((tests + failed))

# On Debian these install what tests need if they may; else they print instructions.
redis:
	@tools/need redis-server redis-server "The tests need a real Redis (or Valkey) server"

tmux:
	@tools/need tmux tmux "The test of \`redlatch top\` needs a terminal"

# Without it the test is left out, unless CI is set.
chromium:
	@tools/need chromium chromium "The test of the page of \`redlatch serve\` needs a browser" || [ -z "$$CI" ]

faketime:
	@tools/need faketime faketime "The test of jobs that run once shifts the clocks of processes"

postgresql:
	@tools/need initdb postgresql "The tests of fencing tokens need a real PostgreSQL server"

mariadb:
	@tools/need mariadbd mariadb-server "The tests of fencing tokens need a real MariaDB server"

patch:
	@tools/need patch patch "The mutants of the simulation are patches"

lint: patch
	@for mutant in simulation/mutants/*.patch simulation/mutants/missed/*.patch; do \
		patch --quiet --strip 1 --fuzz 0 --dry-run <$$mutant >/dev/null || { echo "$$mutant does not apply any more: make it again"; exit 1; }; \
	done
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --all-features --locked -- -D warnings
	$(CARGO) check --package redlatch --no-default-features --locked

# With an example, dependencies have the features that they have for the lints, and are not checked again. The other targets are
# those that have pages anyway.
docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --all-features --locked --lib --bin 'redlatch-bench*' --example quickstart
	@for page in $$(ls docs | grep '\.md$$' | grep -v SUMMARY); do \
		grep -qF "($$page)" docs/SUMMARY.md || { echo "docs/$$page is missing in docs/SUMMARY.md"; exit 1; }; \
	done
	@! grep -n '](\.\./' docs/*.md || { echo 'the book has only docs/: link to https://github.com/redlatch/redlatch/blob/main/...'; exit 1; }

# The tests send signals that this process may have been started to ignore (with nohup).
DEFAULT_SIGNALS := $(shell env --default-signal true 2>/dev/null && echo env --default-signal)

# Tests wait more than they compute, so more of them run at a time than there are cores.
unit: export RUST_TEST_THREADS ?= 16
unit:
	$(DEFAULT_SIGNALS) $(CARGO) test --workspace --exclude redlatch-interop --all-features --locked

# The suites that run on every store, on all deployments except a plain server, and the tests of these deployments.
test-topologies: export RUST_TEST_THREADS ?= 16
test-topologies: redis
	$(CARGO) test --package redlatch --all-features --locked --lib --test it -- \
		secured:: sentinel:: cluster:: cluster_moving:: cluster_update:: replicas:: acl:: tls:: tls_topologies::

# One Redis, shared with the real Redisson in JVMs.
interop: redis
	@tools/interop

interop-build:
	@tools/interop build

jq:
	@tools/need jq jq "The check of the packages reads Cargo's JSON"

# Checks that the crates can be published: their metadata, a dry run, and `cargo check` of the unpacked packages.
package: jq
	@tools/package

# Licenses, known vulnerabilities, duplicates and origins of dependencies. CI does not run it: it needs cargo-deny and github.com.
deny:
	@tools/deny

# The jobs of other schedulers. CI does not run it: their dependencies would be compiled for two examples.
schedulers:
	$(CARGO) clippy --manifest-path examples/schedulers/Cargo.toml --locked --target-dir target/schedulers -- -D warnings

# Whether the version is high enough for the changes of the public API since the last release.
semver:
	@tools/semver

# The guide as a book, in target/book. Needs mdBook.
book:
	@tools/book

# Fuzzes each parser of data from outside for SECONDS=60, TARGETS="url replies" only these.
fuzz:
	@tools/fuzz $(if $(filter command% environment,$(origin SECONDS)),$(SECONDS),60) $(TARGETS)

# The Debian package of the command: program, man pages, completions, example of a configuration.
deb:
	@tools/deb

deb-test: redis
	@tools/deb-test

# Needs Go and modules from its proxy, and takes minutes when nothing is built: not part of `make test`.
packaging-test:
	@tools/packaging-test

# The library's public API, one item a line.
api: target/api.txt
	@diff -u redlatch/api.txt $< || { echo 'the public API has changed; if that is intended, run: make api-update'; exit 1; }

api-update: target/api.txt
	cp $< redlatch/api.txt

.PHONY: target/api.txt
target/api.txt:
	RUSTDOC=$(CURDIR)/tools/rustdoc-unstable $(CARGO) rustdoc --package redlatch --lib --all-features --locked --quiet -- \
		-Zunstable-options --output-format json
	$(CARGO) run --manifest-path tools/public-api/Cargo.toml --locked --quiet --target-dir target -- target/doc/redlatch.json >$@

bench: redis
	$(CARGO) run --profile bench --locked --package redlatch-bench
	$(CARGO) run --profile bench --locked --package redlatch-bench --bin redlatch-bench-allocations

# Redisson and redlatch side by side; needs a JDK and Maven.
bench-redisson: redis
	@tools/interop bench

# Lock libraries for Rust, Go, Python and Java beside redlatch; those whose tools are missing are skipped. QUICK=1 is a trial run.
bench-peers: redis
	@tools/bench-peers $(if $(QUICK),--quick)

robustness: redis
	$(CARGO) run --release --locked --package redlatch-robustness

SECONDS ?= 600
TOPOLOGY ?= single
soak: redis
	$(CARGO) run --release --locked --package redlatch-robustness -- soak --topology $(TOPOLOGY) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# SEEDS=n runs n seeds (from FIRST=m on), SEED=n runs one and prints its trace.
simulate:
	$(CARGO) run --profile simulation --locked --package redlatch-simulation -- \
		$(if $(SEEDS),--seeds $(SEEDS)) $(if $(FIRST),--first $(FIRST)) $(if $(SEED),--seed $(SEED))

# SEEDS=n runs at most n seeds for each mutant, MUTANTS="a b" only these mutants.
simulate-mutants: export SEEDS := $(if $(SEEDS),$(SEEDS),10000)
simulate-mutants:
	tools/simulate-mutants $(MUTANTS)

# Only the crate with the rules is optimized, because only the rules take long. The fair objects that several owners may hold have
# too many states.
STATES ?= 10000000
EXPLORE = $(CARGO) test --package redlatch --lib --all-features --locked --config 'profile.dev.package.redlatch.opt-level=3'
explore:
	REDLATCH_STATES=$(STATES) $(EXPLORE) exploration -- --skip fair_shared --nocapture --test-threads 1
	REDLATCH_STATES=$$(($(STATES) / 10)) $(EXPLORE) fair_shared::exploration -- --nocapture --test-threads 1

RUNS ?= 200
stress: redis
	tools/stress $(RUNS)

# Changes one expression at a time and runs the fast tests. MODULE is hold, lease, wait, watchdog, session or rules.
mutants:
	@tools/mutants "$(MODULE)"
