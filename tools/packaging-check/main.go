// Checks the files in packaging/ where neither Docker nor Kubernetes runs:
//
//	packaging-check manifests FILE...     decodes manifests as an API server does, and checks what they refer to
//	packaging-check dockerfile ROOT FILE  checks a Dockerfile, whose context is ROOT, and prints the command that builds the program
//	packaging-check pods PROGRAM FILE...  runs the containers of the manifests as process 1 in a root file system like that of
//	                                      the image, with a real server, and performs their rolling updates
package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
)

func init() {
	// Pods enter namespaces and die with the thread that started them: everything runs on the main thread.
	runtime.LockOSThread()
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "packaging-check: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("use manifests FILE..., dockerfile ROOT FILE, or pods PROGRAM FILE...")
	}
	switch args[0] {
	case "manifests":
		objects, err := decode(args[1:])
		if err != nil {
			return err
		}
		return checkReferences(objects)
	case "dockerfile":
		return checkDockerfile(args[1], args[2])
	case "pods":
		objects, err := decode(args[2:])
		if err != nil {
			return err
		}
		return runDeployments(args[1], objects)
	}
	return fmt.Errorf("unknown command %q", args[0])
}
