package importer

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
)

// flag returns the expanded value of a flag, and whether the command line has it.
func (c container) flag(name string) (value string, found bool, err error) {
	args := c.Args
	if len(c.Command) > 0 {
		program := path.Base(c.Command[0])
		if slices.Contains([]string{"sh", "bash", "ash", "dash"}, program) {
			return "", false, withHint(hintByHand, fmt.Errorf("it is started by a shell (%s), whose script is not parsed", program))
		}
		args = slices.Concat(c.Command[1:], c.Args)
	}
	for i, arg := range args {
		rest, isFlag := strings.CutPrefix(arg, "-")
		key, given, hasValue := strings.Cut(strings.TrimPrefix(rest, "-"), "=")
		if !isFlag || key != name {
			continue
		}
		if !hasValue {
			if i+1 == len(args) {
				return "", false, fmt.Errorf("--%s has no value", name)
			}
			given = args[i+1]
		}
		if value, err = c.expand(given); err != nil {
			return "", false, fmt.Errorf("--%s: %w", name, err)
		}
		found = true // the last one counts, as with package flag
	}
	return value, found, nil
}

// registrarFlag is flag for the registrar's flags. The all-in-one sidecar has them with a prefix.
func (c container) registrarFlag(name string) (value string, found bool, err error) {
	if value, found, err = c.flag(registrarName + "-" + name); found || err != nil {
		return value, found, err
	}
	return c.flag(name)
}

// expand replaces $(NAME) as Kubernetes does, from the literal env of the container, whose values
// may refer to entries before them. $$ stands for $.
func (c container) expand(s string) (string, error) {
	// Expand each entry once, in order: recursion would not end for entries that refer to each
	// other.
	vars := make(map[string]variable, len(c.Env))
	for _, e := range c.Env {
		var v variable
		if e.ValueFrom != nil {
			v.err = withHint(hintValue, fmt.Errorf("the variable %s has a valueFrom: its value is not in the manifest", safetext.Word(e.Name)))
		} else {
			v.value, v.err = c.replace(e.Value, vars)
		}
		vars[e.Name] = v
	}
	return c.replace(s, vars)
}

// variable is the value of an env entry, or why it is unknown.
type variable struct {
	value string
	err   error
}

// maxValue limits the size of a value: entries can double each other.
const maxValue = 64 << 10

func (c container) replace(s string, vars map[string]variable) (string, error) {
	if err := checkRendered(s); err != nil {
		return "", err
	}
	var err error
	size := len(s)
	value := reference().ReplaceAllStringFunc(s, func(ref string) string {
		if ref == "$$" {
			return "$"
		}
		name := ref[2 : len(ref)-1]
		v, ok := vars[name]
		if !ok {
			v.err = withHint(hintValue, fmt.Errorf("the variable %s is not in the container's env; values from envFrom are not in the manifest", safetext.Word(name)))
		}
		if size += len(v.value); size > maxValue {
			v = variable{err: fmt.Errorf("the value has more than %d bytes", maxValue)}
		}
		err = cmp.Or(err, v.err)
		return v.value
	})
	return value, err
}

// hostPath returns the path on the node of a path in the container.
func (p podSpec) hostPath(c container, file string) (string, error) {
	best := c.mountOf(file)
	if best.MountPath == "" {
		return "", withHint(hintVolume, fmt.Errorf("no volume is mounted at %s, so it exists only inside the container", safetext.Word(file)))
	}
	i := slices.IndexFunc(p.Volumes, func(v volume) bool { return v.Name == best.Name })
	if i < 0 {
		return "", fmt.Errorf("%s is on the volume %s, which the pod does not define", safetext.Word(file), safetext.Word(best.Name))
	}
	v := p.Volumes[i]
	if v.HostPath == nil {
		kinds := append(slices.Sorted(maps.Keys(v.Other)), "emptyDir") // the default of Kubernetes
		return "", withHint(hintVolume, fmt.Errorf("%s is on the volume %s, which is of kind %s: its path on the node is not known",
			safetext.Word(file), safetext.Word(v.Name), safetext.Word(kinds[0])))
	}
	sub := best.SubPath
	if best.SubPathExpr != "" {
		var err error
		if sub, err = c.expand(best.SubPathExpr); err != nil {
			return "", fmt.Errorf("the subPathExpr of volume %s: %w", safetext.Word(v.Name), err)
		}
	}
	if err := cmp.Or(checkRendered(v.HostPath.Path), checkRendered(sub)); err != nil {
		return "", fmt.Errorf("the volume %s: %w", safetext.Word(v.Name), err)
	}
	if !strings.HasPrefix(v.HostPath.Path, "/") {
		return "", fmt.Errorf("the hostPath of volume %s is not absolute: %s", safetext.Word(v.Name), safetext.Quote(v.HostPath.Path))
	}
	rel := strings.TrimPrefix(path.Clean(file), best.MountPath)
	return path.Join(v.HostPath.Path, path.Join("/", sub), rel), nil
}

// mountOf returns the mount that a path in the container is on. The deepest one counts.
func (c container) mountOf(file string) (best volumeMount) {
	for _, m := range c.VolumeMounts {
		if m.MountPath != "" && rootdir.Within(path.Clean(file), m.MountPath) && len(path.Clean(m.MountPath)) > len(best.MountPath) {
			best = m
			best.MountPath = path.Clean(m.MountPath)
		}
	}
	return best
}

// checkRendered returns an error if a value contains a placeholder, either of a template or one
// like <DIR>, which an operator replaces.
func checkRendered(s string) error {
	switch {
	case isTemplate(s):
		return fmt.Errorf("%w: %s", templateError(s), safetext.Quote(s))
	case placeholder().MatchString(s):
		return withHint(hintCluster, fmt.Errorf("this has a placeholder: %s", safetext.Quote(s)))
	}
	return nil
}

// templateError returns an error whose hint says how to render the template s.
func templateError(s string) error {
	program := "envsubst < FILE"
	if strings.Contains(s, "{{") {
		program = "helm template CHART"
	}
	return withHint("render it first, for example: "+program+" | csi-registrar import -", errors.New("this is a template, not a manifest"))
}

// FileName returns the file name for the drop-in of these drivers.
func FileName(registrars []Registrar) string {
	if len(registrars) == 1 {
		return "60-" + registrars[0].Driver.Name + ".toml"
	}
	return "60-csi-drivers.toml"
}

// DropIn returns the TOML that replaces registrars, with instructions in its comments. The tables
// have only the values that differ from the defaults. Without registrars it is empty.
func DropIn(registrars []Registrar, edits []Edits) string {
	if len(registrars) == 0 {
		return ""
	}
	var b strings.Builder
	writeInstructions(&b, registrars, edits)
	// All registrars have the same root directory.
	if rootDir := registrars[0].RootDir; rootDir != config.Default().Kubelet.RootDir {
		b.WriteString("\n# The root directory of the manifest's kubelet. The unit needs a drop-in for it:\n" +
			"# `csi-registrar config check` prints it.\n[kubelet]\nroot_dir = " + strconv.Quote(rootDir) + "\n")
	}
	for _, r := range registrars {
		b.WriteString("\n")
		for _, c := range r.Comments {
			fmt.Fprintf(&b, "# %s\n", c)
		}
		b.WriteString(strings.Join(r.Driver.Table(), "\n") + "\n")
	}
	return b.String()
}

// writeInstructions writes where to save the file, and how to change the workloads of its
// registrars.
func writeInstructions(b *strings.Builder, registrars []Registrar, edits []Edits) {
	what := registrars[0].Driver.Name
	if len(registrars) > 1 {
		what = fmt.Sprintf("%d drivers", len(registrars))
	}
	fmt.Fprintf(b, "# Registers %s in place of node-driver-registrar.\n", what)
	fmt.Fprintf(b, "# Save this as /etc/csi-registrar/conf.d/%s. While node-driver-registrar runs,\n", FileName(registrars))
	b.WriteString("# `csi-registrar status` shows a conflict. Then change these workloads, and roll them out:\n")
	var last []string
	for _, e := range edits {
		if !slices.ContainsFunc(registrars, func(r Registrar) bool { return slices.Contains(r.Workloads, e.Workload) }) {
			continue
		}
		if lines := e.Lines(); !slices.Equal(lines, last) {
			writeLines(b, last)
			b.WriteString("#\n")
			last = lines
		}
		fmt.Fprintf(b, "# %s\n", e.Workload)
	}
	writeLines(b, last)
}

func writeLines(b *strings.Builder, lines []string) {
	for _, line := range lines {
		fmt.Fprintf(b, "#   - %s\n", line)
	}
}
