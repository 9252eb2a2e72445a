package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// Checks that the image starts the program as another user than root, by itself and not through a shell.
func checkDockerfile(root, file string) error {
	opened, err := os.Open(file)
	if err != nil {
		return err
	}
	defer opened.Close()
	parsed, err := parser.Parse(opened)
	if err != nil {
		return err
	}
	var failures []error
	fail := func(format string, args ...any) {
		failures = append(failures, fmt.Errorf(file+": "+format, args...))
	}
	for _, warning := range parsed.Warnings {
		fail("%s", warning.Short)
	}
	warn := func(rule, _, _, message string, _ []parser.Range) { fail("%s: %s", rule, message) }
	stages, _, err := instructions.Parse(parsed.AST, linter.New(&linter.Config{Warn: warn}))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if len(stages) != 2 {
		return fmt.Errorf("%s: it has %d stages in place of 2", file, len(stages))
	}

	built := ""
	for _, command := range stages[0].Commands {
		switch command := command.(type) {
		case *instructions.WorkdirCommand:
			built = filepath.Join(command.Path, "target/release/redlatch")
		case *instructions.RunCommand:
			fmt.Println(strings.Join(command.CmdLine, " "))
		}
	}
	// The release of Debian follows the last dash, such as bookworm and debian12.
	last := stages[1]
	if !strings.HasSuffix(stages[0].BaseName, "-bookworm") || last.BaseName != "gcr.io/distroless/cc-debian12:nonroot" {
		fail("the stages are not of one release of Debian: %s, %s", stages[0].BaseName, last.BaseName)
	}
	user, entrypoint, program := "", []string(nil), ""
	for _, command := range last.Commands {
		switch command := command.(type) {
		case *instructions.CopyCommand:
			for _, source := range command.SourcePaths {
				if command.From != "" {
					program = command.DestPath
					if command.From != stages[0].Name || source != built {
						fail("the first stage does not build %s of %s", source, command.From)
					}
				} else if _, err := os.Stat(filepath.Join(root, source)); err != nil {
					fail("%s", err)
				}
			}
		case *instructions.UserCommand:
			user = command.User
		case *instructions.EntrypointCommand:
			if command.PrependShell {
				fail("the image has no shell to run the entry point")
			}
			entrypoint = command.CmdLine
		default:
			fail("the last stage has no use for %s", command.Name())
		}
	}
	number, _, _ := strings.Cut(user, ":")
	if uid, err := strconv.Atoi(number); err != nil || uid == 0 {
		fail("the user %q is not a number other than 0", user)
	}
	if len(entrypoint) != 1 || entrypoint[0] != program {
		fail("the entry point %q is not the program %s", entrypoint, program)
	}
	return errors.Join(failures...)
}
