// Package cli tests the command line as scripts with whole outputs (testdata/*.txtar): the programs
// as they are packaged, beside a fake kubelet and fake drivers. `go test -update` writes the
// outputs.
//
// Beyond the commands of testscript, a script has
//
//	kubelet start|stop        a fake kubelet, which watches k/plugins_registry
//	driver NAME OPTION...     a fake driver of that name with its socket at NAME.sock, or another state of it:
//	                          stop; not-ready; reports=NAME; topology=KEY=VALUE; limit=N
//	daemon start [FLAG...]    csi-registrar run, until it answers; its log goes to daemon.log
//	daemon stop|kill
//	await DRIVER STATE        wait until status shows the state, or a reason that has this text
//	call ADDRESS              NodeGetInfo at a Unix socket or TCP address, as soon as somebody listens; $PORT is free
//	exec transcript FILE      run the lines of FILE that begin with "$ ", print them with what they print
//
// In a transcript "2> " marks standard error and [N] an exit code that is not 0. Text that
// differs from run to run (times, ages, process and user IDs, the work directory, the version) is
// replaced.
package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

var update = flag.Bool("update", false, "write the outputs into the scripts")

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"transcript": transcript})
}

func TestScripts(t *testing.T) {
	bin, root := t.TempDir(), fake.ShortDir(t)
	build := exec.CommandContext(t.Context(), "../../../../scripts/build", "", bin)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("scripts/build: %v\n%s", err, out)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		WorkdirRoot:         root,
		UpdateScripts:       *update,
		RequireUniqueNames:  true,
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			n := &node{dir: env.WorkDir, bin: bin, drivers: map[string]*fake.Driver{}}
			env.Values[nodeKey{}] = n
			env.Defer(func() {
				if err := n.stop(); err != nil {
					t.Error(err)
				}
			})
			// Wide enough that no line is broken: where would depend on the length of the work
			// directory's path.
			env.Setenv("COLUMNS", "400")
			env.Setenv("PATH", bin+":"+env.Getenv("PATH"))
			// Not UTC, or a time in UTC would look right.
			env.Setenv("TZ", "America/New_York")
			port, err := freePort()
			env.Setenv("PORT", port)
			return errors.Join(err, os.MkdirAll(filepath.Join(env.WorkDir, "k/plugins_registry"), 0o755), expand(env.WorkDir))
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"kubelet": command(func(n *node, args []string) error { return n.runKubelet(args) }),
			"driver":  command(func(n *node, args []string) error { return n.runDriver(args) }),
			"daemon":  command(func(n *node, args []string) error { return n.runDaemon(args) }),
			"call":    command(func(n *node, args []string) error { return n.call(args) }),
			"await":   command(func(n *node, args []string) error { return n.await(args) }),
		},
	})
}

// freePort returns a TCP port of the loopback interface that nobody uses.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, errors.Join(err, l.Close())
}

// command makes a script command of a function.
func command(run func(n *node, args []string) error) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg {
			ts.Fatalf("this command cannot be negated")
		}
		ts.Check(run(ts.Value(nodeKey{}).(*node), args))
	}
}

// expand writes the work directory's path for $WORK in the configuration files of a script.
func expand(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".toml" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, bytes.ReplaceAll(text, []byte("$WORK"), []byte(dir)), 0o644)
	})
}

type nodeKey struct{}

// node is what runs in the background of a script.
type node struct {
	dir, bin string
	api      *fake.APIServer
	kubelet  *fake.Kubelet
	drivers  map[string]*fake.Driver
	daemon   *exec.Cmd
	ended    chan error // capacity one: the daemon's end
}

func (n *node) stop() error {
	var err error
	if n.daemon != nil {
		err = n.runDaemon([]string{"stop"})
	}
	if n.kubelet != nil {
		err = errors.Join(err, n.kubelet.Stop())
	}
	for _, d := range n.drivers {
		d.Kill()
	}
	return err
}

func (n *node) runKubelet(args []string) (err error) {
	switch strings.Join(args, " ") {
	case "start":
		if n.api == nil {
			n.api = fake.NewAPIServer()
		}
		n.kubelet, err = fake.StartKubelet(filepath.Join(n.dir, "k/plugins_registry"), n.api, func(fake.Event) {})
		return err
	case "stop":
		err, n.kubelet = n.kubelet.Stop(), nil
		return err
	}
	return errors.New("usage: kubelet start|stop")
}

func (n *node) runDriver(args []string) error {
	if len(args) == 0 {
		return errors.New("usage: driver NAME [OPTION...]")
	}
	name := args[0]
	d := n.drivers[name]
	if d == nil {
		d = fake.NewDriver(filepath.Join(n.dir, name+".sock"), fake.Healthy(name))
		n.drivers[name] = d
	}
	d.Set(func(a *fake.Answers) { *a = fake.Healthy(name) })
	for _, arg := range args[1:] {
		option, value, _ := strings.Cut(arg, "=")
		switch option {
		case "stop":
			d.Kill()
			return nil
		case "not-ready":
			d.Set(func(a *fake.Answers) { a.NotReady = true })
		case "reports":
			d.Set(func(a *fake.Answers) { a.Name = value })
		case "topology":
			key, value, _ := strings.Cut(value, "=")
			d.Set(func(a *fake.Answers) { a.Topology = map[string]string{key: value} })
		case "limit":
			limit, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return err
			}
			d.Set(func(a *fake.Answers) { a.MaxVolumes = limit })
		default:
			return fmt.Errorf("driver has no option %q", option)
		}
	}
	if d.Running() {
		return nil
	}
	_, err := d.Start()
	return err
}

func (n *node) runDaemon(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "stop":
		err := n.daemon.Process.Signal(syscall.SIGTERM)
		n.daemon = nil
		return errors.Join(err, <-n.ended)
	case len(args) == 1 && args[0] == "kill":
		err := n.daemon.Process.Kill()
		<-n.ended // killed
		n.daemon = nil
		return err
	case len(args) == 0 || args[0] != "start":
		return errors.New("usage: daemon start [FLAG...]|stop|kill")
	}
	log, err := os.OpenFile(filepath.Join(n.dir, "daemon.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	n.daemon = exec.Command(filepath.Join(n.bin, "csi-registrar"), append([]string{"run", "--config-root", n.dir}, args[1:]...)...)
	n.daemon.Dir, n.daemon.Stderr = n.dir, log
	if err := n.daemon.Start(); err != nil {
		return err
	}
	n.ended = make(chan error, 1)
	go func(cmd *exec.Cmd) { n.ended <- cmd.Wait() }(n.daemon)
	return n.until(func(status.Document) bool { return true })
}

func (n *node) await(args []string) error {
	if len(args) != 2 {
		return errors.New("usage: await DRIVER STATE|REASON")
	}
	return n.until(func(s status.Document) bool {
		d, _ := s.Driver(args[0])
		return d.State == args[1] || strings.Contains(d.Reason, args[1])
	})
}

func (n *node) call(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: call ADDRESS")
	}
	target := "unix:" + filepath.Join(n.dir, args[0])
	if strings.Contains(args[0], ":") {
		target = "passthrough:" + args[0]
	}
	c, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err = csi.NewNodeClient(c).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}, grpc.WaitForReady(true))
	return err
}

// until waits until the daemon's status document satisfies the condition.
func (n *node) until(condition func(status.Document) bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client := control.NewClient(control.Path(n.dir))
	var last status.Document
	for {
		doc, err := client.Status(ctx)
		if err == nil {
			last = doc
			if condition(doc) {
				return nil
			}
		}
		select {
		case err := <-n.ended:
			n.daemon = nil
			log, readErr := os.ReadFile(filepath.Join(n.dir, "daemon.log"))
			return fmt.Errorf("the daemon ended: %w; its log:\n%s", errors.Join(err, readErr), log)
		case <-ctx.Done():
			log, readErr := os.ReadFile(filepath.Join(n.dir, "daemon.log"))
			return fmt.Errorf("timed out: %w; the last status is\n%+v\nthe daemon's log:\n%s", errors.Join(err, readErr), last, log)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
