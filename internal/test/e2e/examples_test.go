package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/harness"
)

// nodeReadinessRule has the fields of readiness.node.x-k8s.io/v1alpha1 that the examples use.
type nodeReadinessRule struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		NodeSelector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"nodeSelector"`
		Conditions []struct {
			Type           string `json:"type"`
			RequiredStatus string `json:"requiredStatus"`
		} `json:"conditions"`
		Taint           corev1.Taint `json:"taint"`
		EnforcementMode string       `json:"enforcementMode"`
	} `json:"spec"`
}

// customPlugin has the used fields of the configuration of a node-problem-detector custom plugin.
type customPlugin struct {
	Plugin       string `json:"plugin"`
	PluginConfig struct {
		InvokeInterval  string `json:"invoke_interval"`
		Timeout         string `json:"timeout"`
		MaxOutputLength int    `json:"max_output_length"`
		Concurrency     int    `json:"concurrency"`
		SkipInitial     bool   `json:"skip_initial_status"`
		MessageChanges  bool   `json:"enable_message_change_based_condition_update"`
	} `json:"pluginConfig"`
	Source           string `json:"source"`
	MetricsReporting bool   `json:"metricsReporting"`
	Conditions       []struct {
		Type    string `json:"type"`
		Reason  string `json:"reason"`
		Message string `json:"message"`
	} `json:"conditions"`
	Rules []struct {
		Type      string   `json:"type"`
		Condition string   `json:"condition"`
		Reason    string   `json:"reason"`
		Path      string   `json:"path"`
		Args      []string `json:"args"`
	} `json:"rules"`
}

func example(t *testing.T, name string) string {
	t.Helper()
	return read(t, "packaging/examples/"+name)
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(built.Root(t), name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// decode decodes JSON or YAML into a type that has all its fields.
func decode(t *testing.T, text string, into any) {
	t.Helper()
	b, err := yaml.ToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		t.Fatal(err)
	}
}

// The examples for the Node Readiness Controller and node-problem-detector have no field that
// Kubernetes does not know, and agree with each other, with the units and with the page.
func TestExamplesOfPodsThatWait(t *testing.T) {
	t.Parallel()
	const driver = "nfs.csi.k8s.io"
	var rule, problem nodeReadinessRule
	decode(t, example(t, "readiness/rule.yaml"), &rule)
	decode(t, example(t, "node-problem-detector/rule.yaml"), &problem)
	var plugin customPlugin
	decode(t, example(t, "node-problem-detector/csi-driver.json"), &plugin)

	var account corev1.ServiceAccount
	var role rbacv1.ClusterRole
	var binding rbacv1.ClusterRoleBinding
	var set appsv1.DaemonSet
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(example(t, "readiness/reporter.yaml"))))
	for _, into := range []runtime.Object{&account, &role, &binding, &set} {
		b, err := documents.Read()
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := decoder.Decode(b, nil, into); err != nil {
			t.Fatalf("reporter.yaml: %v", err)
		}
	}
	if _, err := documents.Read(); !errors.Is(err, io.EOF) {
		t.Errorf("reporter.yaml has more objects: %v", err)
	}

	same := func(what string, got ...string) {
		t.Helper()
		if len(slices.Compact(slices.Clone(got))) != 1 || got[0] == "" {
			t.Errorf("%s: %q", what, got)
		}
	}
	env := map[string]string{}
	for _, e := range set.Spec.Template.Spec.Containers[0].Env {
		env[e.Name] = e.Value
	}
	page := read(t, "packaging/doc/readiness.md")
	listen := regexp.MustCompile(`(?m)^ListenStream=(.*)$`).FindStringSubmatch(read(t, "systemd/csi-registrar-http.socket"))
	taint := regexp.MustCompile(`registerWithTaints:\n *- key: (\S+)\n *effect: (\S+)\n`).FindStringSubmatch(page)
	if len(listen) == 0 || len(taint) == 0 {
		t.Fatal("cannot find the address of the unit, or the taint of the page")
	}
	same("taint", taint[1], rule.Spec.Taint.Key, problem.Spec.Taint.Key)
	same("effect", taint[2], string(rule.Spec.Taint.Effect), string(problem.Spec.Taint.Effect))
	same("condition", rule.Spec.Conditions[0].Type, env["CONDITION_TYPE"])
	same("endpoint", "http://"+listen[1]+"/readyz/"+driver+"?live", env["CHECK_ENDPOINT"])
	same("condition of the plugin", problem.Spec.Conditions[0].Type, plugin.Conditions[0].Type, plugin.Rules[0].Condition)
	same("status", "True", rule.Spec.Conditions[0].RequiredStatus)
	same("status of the plugin", "False", problem.Spec.Conditions[0].RequiredStatus)
	same("account", account.Name, binding.Subjects[0].Name, set.Spec.Template.Spec.ServiceAccountName)
	same("namespace", account.Namespace, binding.Subjects[0].Namespace, set.Namespace)
	same("role", role.Name, binding.RoleRef.Name)
	if !set.Spec.Template.Spec.HostNetwork {
		t.Error("the reporter is not in the node's network")
	}
	if !slices.Contains(set.Spec.Template.Spec.Tolerations, corev1.Toleration{Operator: corev1.TolerationOpExists}) {
		t.Error("the reporter does not tolerate the taint")
	}
	// Otherwise node-problem-detector reports "no problem" before its first check, and after the
	// first check of one condition for all others in the file.
	if !plugin.PluginConfig.SkipInitial || len(plugin.Conditions) != 1 || len(plugin.Rules) != 1 {
		t.Errorf("the plugin reports before it has looked: %+v", plugin)
	}
}

// The plugin is run as node-problem-detector runs it. Its exit code is 0 for a registered driver, 1
// for one that is not registered, and another one if that is unknown.
func TestPluginOfNodeProblemDetector(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	var plugin customPlugin
	decode(t, example(t, "node-problem-detector/csi-driver.json"), &plugin)
	rule := plugin.Rules[0]
	script := filepath.Join(built.Root(t), "packaging/examples/node-problem-detector", filepath.Base(rule.Args[0]))
	driver := rule.Args[1]
	limit, err := time.ParseDuration(plugin.PluginConfig.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	command := func() *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), rule.Path, script, driver, "--config-root", n.Etc)
		cmd.Env = append(os.Environ(), "CSI_REGISTRAR="+built.Registrar(t))
		return cmd
	}
	run := func(want int, message string) {
		t.Helper()
		began := time.Now()
		cmd := command()
		out, err := cmd.Output()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		if got := cmd.ProcessState.ExitCode(); got != want || string(out) != message+"\n" {
			t.Errorf("the plugin ends with %d and %q, want %d and %q", got, out, want, message)
		}
		if len(out) > plugin.PluginConfig.MaxOutputLength {
			t.Errorf("%q would be cut", out)
		}
		t.Logf("%d after %v of %v", want, time.Since(began), limit)
	}
	unknown := driver + ": no state; run csi-registrar status " + driver + " on the node"
	run(3, unknown)
	d := n.NewDriver(driver)
	m := n.Manager()
	daemon := m.StartDaemon()
	run(1, unknown)
	n.Configure(driver, d.Socket)
	daemon.WaitState(driver, "absent", soon)
	run(1, driver+": absent")
	k := n.StartKubelet()
	d.Start()
	k.Registered(0, driver, soon)
	daemon.WaitState(driver, "registered", soon)
	run(0, driver+": registered")

	// A driver that does not run stays registered. A restart of the daemon is no reason to report
	// anything, either.
	d.Stop()
	run(0, driver+": registered")
	d.Start()
	daemon.Stop()
	cmd := command()
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m.StartDaemon()
	if err := cmd.Wait(); err != nil {
		t.Errorf("while the daemon is restarted the plugin ends with %v: %s", err, out.String())
	}
}
