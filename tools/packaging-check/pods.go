package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// How long anything may take that takes a moment.
const patience = time.Minute

// The program that the image starts, and what its base image has besides libraries.
const (
	entrypoint = "/usr/bin/redlatch"
	zones      = "/usr/share/zoneinfo"
)

// The programs of the manifests: one that ends in order on SIGTERM, and jobs.
const (
	application = "#!/bin/sh\ntrap 'exit 0' TERM\nwhile :; do sleep 1 & wait $!; done\n"
	job         = "#!/bin/sh\necho this job has run\n"
)

// A file system with what the image has, and a server that the pods reach in it.
type environment struct {
	root   string
	server *exec.Cmd
	pods   int
}

func runDeployments(program string, objects *objects) error {
	env, err := newEnvironment(program)
	if err != nil {
		return err
	}
	defer env.close()
	for _, deployment := range objects.deployments {
		if err := env.runDeployment(deployment, objects); err != nil {
			return fmt.Errorf("%s: %w", deployment.Name, err)
		}
		fmt.Fprintf(os.Stderr, "packaging-check: %s: started, updated, ended\n", deployment.Name)
	}
	return nil
}

func newEnvironment(program string) (_ *environment, err error) {
	root, err := os.MkdirTemp("", "packaging-check")
	if err != nil {
		return nil, err
	}
	env := &environment{root: root}
	defer func() {
		if err != nil {
			env.close()
		}
	}()
	if err := os.Chmod(root, 0o755); err != nil {
		return nil, err
	}
	for _, folder := range []string{"dev", "proc", "run"} {
		if err := os.Mkdir(filepath.Join(root, folder), 0o755); err != nil {
			return nil, err
		}
	}
	libraries, err := librariesOf(program)
	if err != nil {
		return nil, err
	}
	for _, library := range libraries {
		if err := env.copy(library, library); err != nil {
			return nil, err
		}
	}
	shell, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	for target, source := range map[string]string{entrypoint: program, "/bin/sh": shell, "/bin/sleep": shell} {
		if err := env.copy(source, target); err != nil {
			return nil, err
		}
	}
	if err := os.CopyFS(filepath.Join(root, zones), os.DirFS(zones)); err != nil {
		return nil, err
	}
	return env, env.startServer()
}

// Returns what the dynamic linker loads. Each has to be in the base image, which has these packages.
func librariesOf(program string) ([]string, error) {
	output, err := exec.Command("ldd", program).Output()
	if err != nil {
		return nil, fmt.Errorf("ldd %s: %w", program, err)
	}
	libraries := regexp.MustCompile(`/\S+`).FindAllString(string(output), -1)
	for _, library := range libraries {
		resolved, err := filepath.EvalSymlinks(library)
		if err != nil {
			return nil, err
		}
		owner, err := exec.Command("dpkg", "--search", resolved).Output()
		if err != nil {
			// Where /lib is a link to /usr/lib, packages may know the file by either name.
			owner, err = exec.Command("dpkg", "--search", strings.TrimPrefix(resolved, "/usr")).Output()
		}
		if err != nil {
			return nil, fmt.Errorf("%s is in no package: %w", library, err)
		}
		name, _, _ := strings.Cut(string(owner), ":")
		if !slices.Contains([]string{"libc6", "libgcc-s1", "libstdc++6"}, name) {
			return nil, fmt.Errorf("the program needs %s of %s, which the base image lacks", library, name)
		}
	}
	return libraries, nil
}

func (env *environment) copy(source, target string) error {
	content, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	return env.write(target, content, 0o755)
}

func (env *environment) write(target string, content []byte, mode os.FileMode) error {
	path := filepath.Join(env.root, target)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, mode)
}

// The server admits only the user and the password that the pods read from their configuration.
func (env *environment) startServer() error {
	socket := filepath.Join(env.root, "run/redis.sock")
	rules := "user default off\nuser redlatch on >secret ~* &* +@all\n"
	if err := env.write("run/users", []byte(rules), 0o600); err != nil {
		return err
	}
	server := exec.Command("redis-server", "--port", "0", "--unixsocket", socket, "--unixsocketperm", "777",
		"--save", "", "--dir", env.root, "--aclfile", filepath.Join(env.root, "run/users"))
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := server.Start(); err != nil {
		return err
	}
	env.server = server
	return wait("the server to listen", func() (bool, error) {
		connection, err := net.Dial("unix", socket)
		if err != nil {
			return false, nil
		}
		return true, connection.Close()
	})
}

func (env *environment) close() {
	if env.server != nil {
		_ = env.server.Process.Kill()
		_ = env.server.Wait()
	}
	_ = os.RemoveAll(env.root)
}

// A container with redlatch: the only one of its pod that is run.
type template struct {
	deployment *appsv1.Deployment
	container  corev1.Container
	// Where `redlatch elect --http` listens.
	electionPort string
	// It has a crontab.
	hasJobs bool
}

// Starts all pods, replaces one after the other by a new one, as a rolling update does, and ends them.
func (env *environment) runDeployment(deployment *appsv1.Deployment, objects *objects) error {
	template := template{deployment: deployment}
	containers := allContainers(&deployment.Spec.Template.Spec)
	index := slices.IndexFunc(containers, func(container corev1.Container) bool {
		return container.Command == nil || container.Command[0] == entrypoint
	})
	if index < 0 {
		return fmt.Errorf("no container runs %s", entrypoint)
	}
	template.container = containers[index]
	if at := slices.Index(template.container.Args, "--http"); at >= 0 {
		_, template.electionPort, _ = net.SplitHostPort(template.container.Args[at+1])
	}
	if err := env.mountVolumes(&template, objects); err != nil {
		return err
	}

	var pods []*pod
	defer func() {
		for _, pod := range pods {
			pod.kill()
		}
	}()
	start := func() error {
		pod, err := env.start(&template)
		if err != nil {
			return err
		}
		pods = append(pods, pod)
		return pod.awaitReady()
	}
	for range *deployment.Spec.Replicas {
		if err := start(); err != nil {
			return err
		}
	}
	for range *deployment.Spec.Replicas {
		if err := awaitWork(pods); err != nil {
			return err
		}
		if err := start(); err != nil {
			return err
		}
		if err := pods[0].end(); err != nil {
			return err
		}
		pods = pods[1:]
	}
	if err := awaitWork(pods); err != nil {
		return err
	}
	for _, pod := range pods {
		if err := pod.end(); err != nil {
			return err
		}
	}
	pods = nil
	return nil
}

// Writes the files that the container mounts, and the programs that its arguments and its crontab name.
func (env *environment) mountVolumes(template *template, objects *objects) error {
	program := regexp.MustCompile(`/app/\w+`)
	programs := map[string]string{}
	for _, arg := range template.container.Args {
		if program.MatchString(arg) {
			programs[arg] = application
		}
	}
	for _, mount := range template.container.VolumeMounts {
		for _, volume := range template.deployment.Spec.Template.Spec.Volumes {
			if volume.Name != mount.Name {
				continue
			}
			files := map[string]string{"password": "secret\n"}
			if volume.ConfigMap != nil {
				files = objects.configMaps[volume.ConfigMap.Name].Data
			}
			for name, content := range files {
				if name == "crontab" {
					template.hasJobs = true
					for _, name := range program.FindAllString(content, -1) {
						programs[name] = job
					}
					// Each second.
					content = regexp.MustCompile(`(?m)^([*0-9/]+ ){5}`).ReplaceAllString(content, "* * * * * * ")
				}
				content = regexp.MustCompile(`url = ".*"`).ReplaceAllString(content, `url = "redis+unix:///run/redis.sock"`)
				if err := env.write(filepath.Join(mount.MountPath, name), []byte(content), 0o644); err != nil {
					return err
				}
			}
		}
	}
	for name, content := range programs {
		if err := env.write(name, []byte(content), 0o755); err != nil {
			return err
		}
	}
	return nil
}

type pod struct {
	*template
	process *exec.Cmd
	address string
	// The file with its output.
	log    string
	exited chan struct{}
}

// As a container runtime does: own process ids, network and mounts, a root file system that cannot be written, no rights.
const startContainer = `set -e
root=$1 user=$2 address=$3
shift 3
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
ip link set lo up
ip address add "$address/32" dev lo
exec setpriv --no-new-privs chroot --userspec="$user" --groups= "$root" "$@"`

func (env *environment) start(template *template) (*pod, error) {
	env.pods++
	pod := &pod{template: template, address: fmt.Sprintf("10.0.0.%d", env.pods), exited: make(chan struct{})}
	variables := map[string]string{}
	// That of container runtimes.
	environment := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, variable := range template.container.Env {
		value := variable.Value
		if variable.ValueFrom != nil {
			value = pod.address
		}
		variables[variable.Name] = value
		environment = append(environment, variable.Name+"="+value)
	}
	context := template.deployment.Spec.Template.Spec.SecurityContext
	user := fmt.Sprintf("%d:%d", *context.RunAsUser, *context.RunAsGroup)
	args := []string{"-c", startContainer, "sh", env.root, user, pod.address, entrypoint}
	for _, arg := range template.container.Args {
		args = append(args, regexp.MustCompile(`\$\((\w+)\)`).ReplaceAllStringFunc(arg, func(name string) string {
			return variables[name[2:len(name)-1]]
		}))
	}
	pod.process = exec.Command("sh", args...)
	pod.process.Dir = "/"
	pod.process.Env = environment
	pod.log = filepath.Join(env.root, "run", pod.address)
	output, err := os.Create(pod.log)
	if err != nil {
		return nil, err
	}
	defer output.Close()
	pod.process.Stdout, pod.process.Stderr = output, output
	pod.process.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := pod.process.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = pod.process.Wait()
		close(pod.exited)
	}()
	return pod, nil
}

// Waits until the readiness probe succeeds, or, without one, until the program handles SIGTERM, as process 1 has to.
func (pod *pod) awaitReady() error {
	return pod.wait("be ready", func() (bool, error) {
		probe := pod.container.ReadinessProbe
		if probe == nil {
			return pod.handles(unix.SIGTERM)
		}
		number, err := port(&pod.container, probe.HTTPGet.Port)
		if err != nil {
			return false, err
		}
		status := pod.get(pod.address, strconv.Itoa(int(number)), probe.HTTPGet.Path)
		return status >= 200 && status < 400, nil
	})
}

// Returns whether redlatch runs in the pod and catches a signal, or blocks it to read it.
func (pod *pod) handles(signal syscall.Signal) (bool, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pod.process.Process.Pid))
	if err != nil || !bytes.HasPrefix(status, []byte("Name:\tredlatch\n")) {
		return false, nil
	}
	for _, masks := range regexp.MustCompile(`Sig(?:Blk|Cgt):\t(\w+)`).FindAllSubmatch(status, -1) {
		mask, err := strconv.ParseUint(string(masks[1]), 16, 64)
		if err != nil {
			return false, err
		}
		if mask&(1<<(signal-1)) != 0 {
			return true, nil
		}
	}
	return false, nil
}

// Waits until the pods do what they are for: exactly one says that it leads, or one of them has run a job since this call.
func awaitWork(pods []*pod) error {
	if pods[0].hasJobs {
		before := runs(pods)
		return pods[0].wait("run a job", func() (bool, error) { return runs(pods) > before, nil })
	}
	if pods[0].electionPort == "" {
		return nil
	}
	return pods[0].wait("have one leader", func() (bool, error) {
		leaders := 0
		for _, pod := range pods {
			if pod.get("127.0.0.1", pod.electionPort, "/leader") == http.StatusOK {
				leaders++
			}
		}
		if leaders > 1 {
			return false, fmt.Errorf("%d pods lead", leaders)
		}
		return leaders == 1, nil
	})
}

func runs(pods []*pod) int {
	count := 0
	for _, pod := range pods {
		count += strings.Count(pod.printed(), "this job has run")
	}
	return count
}

// Returns the status of an answer to a request from within the pod, or 0 without an answer.
func (pod *pod) get(host, port, path string) int {
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return 0
	}
	defer own.Close()
	network, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pod.process.Process.Pid))
	if err != nil {
		return 0
	}
	defer network.Close()
	if unix.Setns(int(network.Fd()), unix.CLONE_NEWNET) != nil {
		return 0
	}
	connection, err := net.DialTimeout("tcp", net.JoinHostPort(host, port), patience)
	if unix.Setns(int(own.Fd()), unix.CLONE_NEWNET) != nil {
		panic("the thread cannot leave the network of a pod")
	}
	if err != nil {
		return 0
	}
	defer connection.Close()
	_ = connection.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintf(connection, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", path, host); err != nil {
		return 0
	}
	response, err := http.ReadResponse(bufio.NewReader(connection), nil)
	if err != nil {
		return 0
	}
	_, _ = io.Copy(io.Discard, response.Body)
	return response.StatusCode
}

// Sends SIGTERM, as a kubelet does, and waits until all processes of the pod have ended.
func (pod *pod) end() error {
	if err := pod.process.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-pod.exited:
	case <-time.After(patience):
		pod.kill()
		return fmt.Errorf("a pod does not end after SIGTERM: %s", pod.printed())
	}
	// 143: the signal reached a pod that had nothing to end.
	if code := pod.process.ProcessState.ExitCode(); code != 0 && code != 128+int(syscall.SIGTERM) {
		return fmt.Errorf("a pod ends with %v: %s", pod.process.ProcessState, pod.printed())
	}
	return nil
}

func (pod *pod) printed() string {
	output, _ := os.ReadFile(pod.log)
	return string(output)
}

func (pod *pod) kill() {
	_ = pod.process.Process.Kill()
	<-pod.exited
}

// As `wait`, but fails when the pod has ended.
func (pod *pod) wait(what string, isDone func() (bool, error)) error {
	err := wait("a pod to "+what, func() (bool, error) {
		select {
		case <-pod.exited:
			return false, fmt.Errorf("a pod has ended: %v", pod.process.ProcessState)
		default:
			return isDone()
		}
	})
	if err != nil {
		pod.kill()
		return fmt.Errorf("%w\n%s", err, pod.printed())
	}
	return nil
}

func wait(what string, isDone func() (bool, error)) error {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if done, err := isDone(); done || err != nil {
			return err
		}
	}
	return fmt.Errorf("waited in vain for %s", what)
}
