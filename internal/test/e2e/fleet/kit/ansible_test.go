package kit_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// playbooks runs Ansible against machines.
type playbooks struct {
	t          *testing.T
	controller *nspawn.Machine // has Ansible, and stays off
	dir        string          // of the inventory and the drop-in
}

// newPlaybooks prepares Ansible for machines that are on. Its ssh is nsenter.
func newPlaybooks(t *testing.T, machines []*machine) *playbooks {
	t.Helper()
	p := &playbooks{t, nspawn.New(t, suite), t.TempDir()}
	inventory := ""
	for _, m := range machines {
		inventory += m.name + "\n"
		p.write(m.name+".pid", fmt.Sprint(m.Leader()))
	}
	p.write("inventory", inventory+`[all:vars]
ansible_user=root
ansible_python_interpreter=/usr/bin/python3
csi_registrar_drop_ins=["`+p.dir+`/60-sample.toml"]
csi_registrar_timeout=55s
`)
	p.write("60-sample.toml", read(t, "packaging/examples/sample/20-sample.toml"))
	p.write("ssh", `#!/bin/sh
# ssh [OPTION]... HOST COMMAND
while [ $# -gt 2 ]; do shift; done
exec nsenter -t "$(cat "`+p.dir+`/$1.pid")" -a -- env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 sh -c "$2"
`)
	return p
}

// write writes a file that Ansible sees at the same path.
func (p *playbooks) write(name, content string) {
	p.t.Helper()
	if err := os.WriteFile(filepath.Join(p.dir, name), []byte(content), 0o755); err != nil {
		p.t.Fatal(err)
	}
}

// recap is a line of the summary.
var recap = regexp.MustCompile(`(?m)^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=(\d+) +failed=(\d+)`)

// play runs a playbook, and compares its summary: for each node that it reached "changed=N", or
// "failed".
func (p *playbooks) play(want string, args ...string) (output string) {
	p.t.Helper()
	examples := filepath.Join(built.Root(p.t), "packaging/examples/ansible")
	cmd := exec.Command("unshare", append([]string{"--mount", "sh", "-euc", `root=$0
		for path in /proc /sys /dev "$dir" "$examples"; do
			mkdir -p "$root$path"
			mount --rbind "$path" "$root$path"
		done
		exec chroot "$root" /usr/bin/env -C "$examples" ansible-playbook -i "$dir/inventory" "$@"`, p.controller.Disk}, args...)...)
	cmd.Env = []string{
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8", "dir=" + p.dir, "examples=" + examples, "ANSIBLE_NOCOLOR=1",
		"ANSIBLE_SSH_EXECUTABLE=" + p.dir + "/ssh", "ANSIBLE_SSH_TRANSFER_METHOD=piped", "ANSIBLE_PIPELINING=1",
	}
	out, err := cmd.CombinedOutput()
	var got []string
	for _, line := range recap.FindAllStringSubmatch(string(out), -1) {
		switch {
		case line[3] != "0":
			got = append(got, line[1]+" unreachable")
		case line[4] != "0":
			got = append(got, line[1]+" failed")
		default:
			got = append(got, line[1]+" changed="+line[2])
		}
	}
	if summary := strings.Join(got, ", "); summary != want || (err != nil) != strings.Contains(want, "failed") {
		p.t.Fatalf("%q: %v: %s, want %s\n%s", args, err, summary, want, out)
	}
	return string(out)
}

// TestAnsible rolls csi-registrar out to three nodes with the example's role, in way A of
// rollout.md: installed beside the sidecar, upgraded and downgraded in waves, which end with the
// first node that fails, and rolled back.
func TestAnsible(t *testing.T) {
	t.Parallel()
	var all []*machine
	for _, name := range []string{"n1", "n2", "n3"} {
		m := newMachine(t, suite, name)
		m.sidecar()
		all = append(all, m)
	}
	packages := repository(t)
	for _, m := range all {
		m.Args = append(m.Args, "--bind-ro="+packages+":/srv/repository")
		m.Write("/etc/apt/sources.list", "deb [signed-by=/srv/repository/key.asc] file:/srv/repository/deb stable main\n")
		m.Boot()
		m.registered(driver, true)
	}
	p := newPlaybooks(t, all)
	const dropIn = "/etc/csi-registrar/conf.d/60-sample.toml"
	good := read(t, "packaging/examples/sample/20-sample.toml")
	onlyFirst := func(what string, change func()) {
		t.Helper()
		before := []int{all[1].writes(), all[2].writes()}
		change()
		for i, m := range all[1:] {
			if m.Read(dropIn) != good || m.writes() != before[i] {
				t.Errorf("%s: it went on to %s", what, m.name)
			}
		}
	}
	version := func(v string) []string {
		return []string{"site.yml", "-e", "csi_registrar_package=csi-registrar=" + v}
	}

	each := func(check func(m *machine, inner func()), change func()) { // of each node
		for _, m := range all {
			inner := change
			change = func() { check(m, inner) }
		}
		change()
	}
	taken := func(m *machine, change func()) { m.costs(2, change) }
	each(taken, func() { p.play("n1 changed=2, n2 changed=2, n3 changed=2", version(older)...) })
	p.play("n1 changed=0, n2 changed=0, n3 changed=0", version(older)...)
	for _, v := range []string{newer, older} {
		each(func(m *machine, change func()) { m.unnoticed(v, change) }, func() {
			p.play("n1 changed=1, n2 changed=1, n3 changed=1", version(v)...)
		})
	}

	p.write("60-sample.toml", strings.Replace(good, "socket =", "sockets =", 1))
	onlyFirst("a drop-in with an error", func() {
		if out := p.play("n1 failed", "site.yml"); !strings.Contains(out, "sockets: is not known") {
			t.Errorf("the error is not shown:\n%s", out)
		}
	})
	all[0].registered(driver, true)
	if all[0].Read(dropIn) != good {
		t.Error("the drop-in with an error was written")
	}
	p.write("60-sample.toml", strings.Replace(good, "csi.sock", "other.sock", 1))
	onlyFirst("a driver that does not answer", func() { p.play("n1 failed", "site.yml") })
	p.write("60-sample.toml", good)
	p.play("n1 changed=1, n2 changed=0, n3 changed=0", "site.yml")
	all[0].registered(driver, true)

	// One node of a larger wave.
	before := all[2].writes()
	p.write("60-broken.toml", "[driver.\n")
	p.play("n1 changed=0, n2 failed", "site.yml", "-e", `{"csi_registrar_waves": [2, 1],
		"csi_registrar_drop_ins": ["`+p.dir+`/60-{{ 'broken' if inventory_hostname == 'n2' else 'sample' }}.toml"]}`)
	if all[2].writes() != before {
		t.Error("n3 was changed")
	}

	// The sidecar takes the driver back.
	all[1].costs(2, func() { p.play("n2 changed=2", "rollback.yml", "--limit", "n2") })
	all = []*machine{all[0], all[2]}
	each(taken, func() { p.play("n1 changed=2, n2 changed=0, n3 changed=2", "rollback.yml") })
}
